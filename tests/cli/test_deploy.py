"""`pagedray deploy check`: one line for each value that cannot work, and none for ours."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import msgspec
import pytest
import yaml

from cluster.cli.commands import main
from cluster.cli.deploy_hold import wait_for_drains
from cluster.engine.engine_options import EngineOptions
from cluster.serving.ray_serve.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

_DEPLOY = Path(__file__).parents[2] / "deploy" / "helm"
_CHART = _DEPLOY / "pagedray"
_MODEL = "model: /models/Llama-3.1-8B-Instruct\n"
_SET_BY_THE_CHART = {
    "api_keys",
    "device",
    "disk_cache_bytes",
    "disk_cache_folder",
    "drain_timeout_s",
    "max_replicas",
    "num_replicas",
    "placement_strategy",
    "tensor_parallel_size",
}

LIMIT_S = 150.0


def check(folder: Path, text: str, *flags: str) -> int:
    path = folder / "values.yaml"
    path.write_text(text)
    return main(["deploy", "check", str(path), "--chart", str(_CHART), *flags])


@pytest.mark.parametrize("path", sorted(_DEPLOY.glob("values/*.yaml")), ids=lambda path: path.stem)
def test_our_values_have_no_errors(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "check", str(path), "--chart", str(_CHART)]) == 0
    assert "helm install pagedray" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("replicas: 1\n", "model: '' does not match"),
        ("model: a b\n", "model: 'a b' does not match"),
        (f"{_MODEL}replica: 2\n", "'replica' was unexpected"),
        (f"{_MODEL}gpusPerHost: -1\n", "gpusPerHost: -1 is less than the minimum of 0"),
        (f"{_MODEL}worker: {{cpu: 8}}\n", "worker.cpu: 8 is not of type 'string'"),
        (f"{_MODEL}worker: null\n", "'worker' is a required property"),
        (f"{_MODEL}image: {{tag: 1:30}}\n", "image.tag: 90 is not of type 'string'"),
        (f"{_MODEL}storage: {{size: '{'9' * 5000}Gi'}}\n", "storage.size: "),
        (f"{_MODEL}arguments: {{num_block: 1}}\n", "'num_block' was unexpected"),
        (f"{_MODEL}arguments: {{itl_target_ms: -1}}\n", "itl_target_ms must be above 0"),
        (f"{_MODEL}arguments: {{block_size: 0}}\n", "arguments.block_size: block_size must be"),
        (f"{_MODEL}arguments: {{lease_s: 1}}\n", "arguments.lease_s: lease_s must be at least 5"),
        (
            f"{_MODEL}diskCache: {{size: 9Gi}}\narguments: {{enable_prefix_cache: false}}\n",
            "arguments",
        ),
        (f"{_MODEL}worker: {{cpu: 1500m}}\n", "worker.cpu: 1500m is not enough"),
        (f"{_MODEL}worker: {{sharedMemory: 64Gi}}\n", "must be less than worker.memory, 64Gi"),
        (
            f"{_MODEL}tensorParallelSize: 8\ngpusPerHost: 8\nworker: {{cpu: '9', memory: 32Gi}}\n",
            "worker.sharedMemory: 32Gi (its default) must be less than worker.memory, 32Gi",
        ),
        (f"{_MODEL}worker: {{sharedMemory: 100Mi}}\n", "worker.sharedMemory: 100Mi is not enough"),
        (f"{_MODEL}replicas: 2\nstorage: {{accessMode: ReadWriteOnce}}\n", "for 2 workers"),
    ],
)
def test_each_error_is_one_line_with_the_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, error: str
) -> None:
    assert check(tmp_path, text) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{tmp_path / 'values.yaml'}: ")
    assert error in line


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("- model\n", "must have lines such as"),
        ("model: [\n", "is not valid YAML"),
        ("model: 2026-13-45\n", "month must be in 1..12"),
        (f"replicas: {'9' * 5000}\n", "is not valid YAML"),
    ],
)
def test_an_invalid_file_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, error: str
) -> None:
    assert check(tmp_path, text) == 2
    assert error in capsys.readouterr().err


def test_later_files_replace_values_of_those_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(f"{_MODEL}replicas: 0\nworker: {{memory: 8Gi, cpu: '9'}}\n")
    second.write_text("replicas: 2\nworker: {cpu: '1'}\n")
    command = ["deploy", "check", str(first), str(second), "--chart", str(_CHART)]
    assert main(command) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{first}, {second}: worker.cpu: 1 is not enough")
    second.write_text("replicas: 2\n")
    assert main(command) == 0
    assert f"--values {first} --values {second} --set" in capsys.readouterr().out


def test_a_chart_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(tmp_path, _MODEL, "--chart", str(tmp_path / "chart")) == 2
    assert f"There is no chart {tmp_path / 'chart'}; run this in" in capsys.readouterr().err


def test_the_arguments_of_the_schema_are_those_of_the_application() -> None:
    schema = json.loads((_CHART / "values.schema.json").read_text())
    known = {one.name for one in (*fields(EngineOptions), *fields(ServeOptions))}
    assert known > _SET_BY_THE_CHART
    assert set(schema["properties"]["arguments"]["properties"]) == known - _SET_BY_THE_CHART


@pytest.mark.parametrize("options", [EngineOptions, ServeOptions])
def test_arguments_have_the_types_that_the_application_takes(options: type) -> None:
    schema = json.loads((_CHART / "values.schema.json").read_text())
    given = schema["properties"]["arguments"]["properties"]
    for name, one in msgspec.json.schema(options)["$defs"][options.__name__]["properties"].items():
        if name in _SET_BY_THE_CHART:
            continue
        # Null is what an argument that is left out has.
        forms = [form for form in one.get("anyOf", [one]) if form.get("type") != "null"]
        if "enum" in forms[0]:
            assert given[name] == {"enum": forms[0]["enum"]}
        else:
            types = given[name]["type"]
            wanted = [form["type"] for form in forms]
            assert (types if isinstance(types, list) else [types]) == wanted


def test_every_default_is_in_the_schema() -> None:
    schema = json.loads((_CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((_CHART / "values.yaml").read_text())
    assert _paths(defaults) == _schema_paths(schema) - {"global"}
    jsonschema.Draft7Validator(schema).validate(defaults | {"model": "a/b"})
    # Helm removes a default that is null, and then a template fails without its name.
    assert _required_paths(schema) == _paths(defaults)


def _paths(values: Mapping[str, object], prefix: str = "") -> set[str]:
    paths = set()
    for name, value in values.items():
        # Mappings of the user's own keys are values as a whole.
        if isinstance(value, dict) and value and name != "podLabels":
            paths |= _paths(value, f"{prefix}{name}.")
        else:
            paths.add(f"{prefix}{name}")
    return paths


def _schema_paths(schema: dict[str, Any], prefix: str = "") -> set[str]:
    paths = set()
    for name, one in schema["properties"].items():
        if "properties" in one and name != "arguments":
            paths |= _schema_paths(one, f"{prefix}{name}.")
        else:
            paths.add(f"{prefix}{name}")
    return paths


def _required_paths(schema: dict[str, Any], prefix: str = "") -> set[str]:
    paths = set()
    for name in schema["required"]:
        one = schema["properties"][name]
        is_inner = "properties" in one and name != "arguments"
        paths |= _required_paths(one, f"{prefix}{name}.") if is_inner else {f"{prefix}{name}"}
    return paths


@dataclass(slots=True)
class FakeNodes:
    """Workers that drain for a while, and a GCS that may be away; the time is how often asked."""

    drains: list[tuple[float, float]] = field(default_factory=list)
    is_away: tuple[float, float] = (0.0, 0.0)
    now_s: float = 0.0

    def num_draining(self) -> int:
        if self.is_away[0] <= self.now_s < self.is_away[1]:
            raise ConnectionError("The GCS does not answer")
        return sum(begin <= self.now_s < end for begin, end in self.drains)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def _wait(nodes: FakeNodes) -> tuple[str, float]:
    reason = wait_for_drains(nodes, limit_s=LIMIT_S, clock=lambda: nodes.now_s, sleep=nodes.sleep)
    return reason, nodes.now_s


def test_a_head_that_ends_alone_waits_for_workers_to_begin_only() -> None:
    assert _wait(FakeNodes()) == ("No worker is draining", 10.0)


@pytest.mark.parametrize("begin_s", [0.0, 6.0, 9.0])
def test_a_head_that_ends_with_its_workers_waits_for_the_last(begin_s: float) -> None:
    nodes = FakeNodes(drains=[(begin_s, 40.0), (begin_s, 90.0)])
    assert _wait(nodes) == ("No worker is draining", 90.0)


def test_a_worker_that_drains_for_long_is_not_waited_for_beyond_the_limit() -> None:
    nodes = FakeNodes(drains=[(0.0, 1000.0)])
    assert _wait(nodes) == ("The limit is reached", LIMIT_S)


def test_a_gcs_that_has_ended_holds_nothing() -> None:
    nodes = FakeNodes(drains=[(0.0, 100.0)], is_away=(20.0, 1000.0))
    assert _wait(nodes) == ("The GCS does not answer", 22.0)


def test_a_gcs_that_misses_a_question_is_asked_again() -> None:
    nodes = FakeNodes(drains=[(0.0, 100.0)], is_away=(20.0, 22.0))
    assert _wait(nodes) == ("No worker is draining", 100.0)
