"""Every block of code in the documents runs as written, or is listed with a reason and checked.

Programs and commands run in a folder that looks like a checkout, against one server.
"""

import ast
import importlib
import inspect
import json
import os
import re
import signal
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import yaml
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from cluster.cli.config_file import apply_config
from cluster.cli.parser import command_parser, make_parser
from cluster.serving.auth import KeyFile
from cluster.serving.ray_serve.autoscaling import TokensPolicy
from cluster.serving.ray_serve.options import read_arguments
from tests.deploy.kustomize import render
from tests.docs.command_checks import BLOCKS, Block, check_command
from tests.docs.not_run import NOT_RUN, SLOW, is_run, is_slow
from tests.orphan_guard import OrphanGuard
from tests.system.server_process import ROOT, ServerProcess, ready_line

_LANGUAGES = frozenset(("json", "promql", "python", "sh", "text", "toml", "yaml"))
_DEFAULT_URL = {"pagedray bench serve": "--base-url", "pagedray top": "--url"}
"""Flags that name the server, by commands that have a default for it."""
# Any: what a text has.
_READERS: Mapping[str, Callable[[str], Any]] = {
    "json": json.loads,
    "toml": tomllib.loads,
    "yaml": yaml.safe_load,
}
_LINKS = (".venv", "deploy", "examples", "protos")
_TIMEOUT_S = 120.0


def _of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def _runs(blocks: list[Block]) -> pytest.MarkDecorator:
    """Parametrize a test with the blocks that it runs."""
    slow = pytest.mark.slow
    return pytest.mark.parametrize(
        "block",
        [pytest.param(one, marks=slow) if is_slow(one) else one for one in blocks if is_run(one)],
        ids=lambda block: block.key[:60],
    )


def _is_server(block: Block) -> bool:
    return block.text.split()[:2] == ["pagedray", "serve"]


def _one(path: str, language: str, start: str) -> Block:
    found = [one for one in _of(language) if one.path == path and one.text.startswith(start)]
    assert len(found) == 1, found
    return found[0]


by_key = pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.key[:60])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the shipped model without API keys, greedy unless requests say otherwise."""
    folder = tmp_path_factory.mktemp("greedy")
    (folder / "generation_config.json").write_text('{"temperature": 0.0}')
    options = ("--executor=local", "--resume-anonymous", f"--generation-config={folder}")
    with ServerProcess(options) as server:
        yield server


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that has what a reader's folder has, as the folder of the process."""
    for name in _LINKS:
        (tmp_path / name).symlink_to(ROOT / name)
    trace = _one("docs/simulation.md", "json", '{"arrival_s"').text
    (tmp_path / "requests.jsonl").write_text(trace)
    values = _one("docs/kubernetes.md", "yaml", "image:").text
    (tmp_path / "my-values.yaml").write_text(values)
    monkeypatch.chdir(tmp_path)
    # No command of a block may reach the network.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return tmp_path


def _addressed(text: str, server: ServerProcess) -> str:
    """Return a text with the ports and the model of a server."""
    text = text.replace("127.0.0.1:8000", f"127.0.0.1:{server.http_port}")
    text = text.replace("127.0.0.1:9000", f"127.0.0.1:{server.grpc_port}")
    text = text.replace('"model": "Llama-3.1-8B-Instruct"', '"model": "tiny-llama"')
    for command, flag in _DEFAULT_URL.items():
        if flag not in text:
            text = text.replace(command, f"{command} {flag} {server.url}")
    return text


def _run(text: str) -> str:
    """Return what commands print. They have no input."""
    path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "KEY": "none"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@by_key
def test_block_has_a_known_language(block: Block) -> None:
    assert block.language in _LANGUAGES


@pytest.mark.parametrize("pattern", [*NOT_RUN, *SLOW])
def test_reason_belongs_to_a_block(pattern: str) -> None:
    assert any(fnmatchcase(block.key, pattern) for block in BLOCKS)


@pytest.mark.parametrize("block", _of("sh"), ids=lambda block: block.key[:60])
def test_commands_are_correct(block: Block) -> None:
    for words in block.commands():
        check_command(words)


@pytest.mark.parametrize("block", _of("python"), ids=lambda block: block.key[:60])
def test_program_compiles_and_its_imports_exist(block: Block) -> None:
    tree = compile(
        block.text, block.path, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            module = importlib.import_module(node.module)
            for name in node.names:
                assert hasattr(module, name.name), f"{node.module} has no {name.name}."


@pytest.mark.parametrize("block", _of(*_READERS), ids=lambda block: block.key[:60])
def test_data_can_be_read(block: Block) -> None:
    assert _READERS[block.language](block.text)


@_runs(_of("python"))
@pytest.mark.usefixtures("checkout")
def test_program_runs(
    server: ServerProcess, block: Block, capsys: pytest.CaptureFixture[str]
) -> None:
    code = compile(_addressed(block.text, server), block.path, "exec")
    exec(code, {"__name__": "__main__"})
    # Sampled text may be short.
    assert capsys.readouterr().out


@_runs([one for one in _of("sh") if not _is_server(one)])
@pytest.mark.usefixtures("checkout")
def test_commands_run(server: ServerProcess, block: Block) -> None:
    is_curl = any(words[0] == "curl" for words in block.commands())
    if is_curl and which("curl") is None and "CI" not in os.environ:
        pytest.skip("needs curl")
    printed = _run(_addressed(block.text, server))
    assert printed
    # As the name of a field: a model may write the word.
    assert '"error":' not in printed


@_runs([one for one in _of("sh") if _is_server(one)])
@pytest.mark.usefixtures("checkout")
def test_server_starts_and_stops(block: Block) -> None:
    (command,) = block.commands()
    process = subprocess.Popen(
        [ROOT / ".venv/bin/pagedray", *command[1:], "--grpc-port=0", "--http-port=0"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with OrphanGuard(process):
        try:
            assert "tiny-llama at http://127.0.0.1:" in ready_line(process)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30.0)
    assert process.returncode == 0


@pytest.mark.usefixtures("checkout")
def test_simulation_takes_the_cost_of_the_document(checkout: Path) -> None:
    cost = checkout / "cost.json"
    cost.write_text(_one("docs/simulation.md", "json", '{"points"').text)
    printed = _run(f"pagedray simulate --num-prompts 4 --cost {cost} --json")
    assert json.loads(printed)["completed"] == 4


def test_metrics_of_expressions_are_documented() -> None:
    for block in _of("promql"):
        documented = (ROOT / block.path).read_text()
        for name in re.findall(r"pagedray_\w+", block.text):
            assert f"| `{name}` |" in documented


def test_key_file_is_accepted(tmp_path: Path) -> None:
    block = _one("docs/keys.md", "toml", "[tenants.alice]")
    path = tmp_path / "keys.toml"
    digests = iter(("a" * 64, "b" * 64))
    path.write_text(re.sub(r"sha256:[^\"]*", lambda _: f"sha256:{next(digests)}", block.text))
    path.chmod(0o600)
    assert KeyFile.from_file(path).tenants.keys() == {"alice", "ops"}


def test_file_of_flags_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(_one("docs/configuration.md", "yaml", "model:").text)
    parser = command_parser(make_parser(), "serve")
    arguments = apply_config(parser, ["--config", str(path), "--max-model-len", "1K"])
    parsed = parser.parse_args(arguments)
    assert parsed.model == "examples/tiny-llama"
    assert (parsed.max_model_len, parsed.max_queued_requests) == (1024, 100)


def test_serve_configuration_is_accepted() -> None:
    block = _one("docs/ray-serve.md", "yaml", "# config.yaml")
    config = ServeDeploySchema.model_validate(yaml.safe_load(block.text))
    [application] = config.applications
    assert application.import_path == "pagedray:build_app"
    assert read_arguments(application.args).serve.num_replicas == 2
    (services,) = config.grpc_options.grpc_servicer_functions
    assert config.controller_options is not None
    environment = config.controller_options.runtime_env
    assert environment is not None
    callback = environment["env_vars"]["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"]
    for path in (services, callback.replace(":", ".")):
        module, _, name = path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))


def test_autoscaling_of_a_deployment_has_our_policy() -> None:
    block = _one("docs/ray-serve.md", "yaml", "# in an application of config.yaml")
    application = {"import_path": "pagedray:build_app", **yaml.safe_load(block.text)}
    config = ServeDeploySchema.model_validate({"applications": [application]})
    [deployment] = config.applications[0].deployments
    assert isinstance(deployment.autoscaling_config, dict)
    given = AutoscalingConfig(**deployment.autoscaling_config)
    assert given.policy.policy_kwargs.keys() == inspect.signature(TokensPolicy).parameters.keys()
    module, _, name = str(given.policy.policy_function).partition(":")
    assert getattr(importlib.import_module(module), name) is TokensPolicy
    # A name that Serve does not know would be ignored.
    assert deployment.autoscaling_config.keys() <= AutoscalingConfig.model_fields.keys()


@pytest.mark.parametrize("component", ["gpu-node", "monitoring"])
def test_overlay_is_rendered(tmp_path: Path, component: str) -> None:
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    base = _one("docs/kubernetes.md", "yaml", "apiVersion: kustomize").text
    (added,) = (one.text for one in _of("yaml") if one.text.endswith(f"components/{component}\n"))
    folder = tmp_path / "my-llm"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(base + added)
    with_it = render(folder)
    (folder / "kustomization.yaml").write_text(base)
    assert with_it != render(folder)
    assert "REGISTRY/pagedray:" in str(with_it)


def test_route_leads_to_the_service() -> None:
    route = yaml.safe_load(_one("docs/kubernetes.md", "yaml", "apiVersion: gateway").text)
    [service] = route["spec"]["rules"][0]["backendRefs"]
    check_command(["kubectl", "get", f"service/{service['name']}"])
    [manifest] = (one for one in render(ROOT / "deploy/kuberay/overlays/gpu-1")
                  if one["kind"] == "RayService")  # fmt: skip
    ports = manifest["spec"]["serveService"]["spec"]["ports"]
    assert service["port"] in [one["port"] for one in ports]
