"""`pagedray deploy check`: one line for each value that cannot work, and none for ours."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import yaml

from cluster.cli.commands import main
from cluster.cli.deploy.rules import rule_errors
from cluster.cli.deploy.values import Values, read_values, schema_errors
from cluster.engine.options.engine_options import EngineOptions
from cluster.serving.ray_serve.options import ServeOptions
from tests.downloads.faulty_server import Fault

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.downloads.small_s3 import SmallS3

_DEPLOY = Path(__file__).parents[3] / "deploy" / "helm"
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
        ("replicas: 1\n", "model: '' must be a Hub id"),
        ("model: ../x\n", "model: '../x' must be a Hub id"),
        ("model: a b\n", "model: 'a b' must be a Hub id"),
        ("model: /models/a..b\n", "model: '/models/a..b' must be a Hub id"),
        ("model: \"/models/'x'\"\n", "must be a Hub id"),
        (f"{_MODEL}replica: 2\n", "replica: the chart has no such value; did you mean replicas?"),
        (
            f"{_MODEL}worker: {{cpus: '2'}}\n",
            "worker.cpus: the chart has no such value; did you mean cpu?",
        ),
        (f"{_MODEL}gpusPerHost: -1\n", "gpusPerHost: -1 must be at least 0."),
        (f"{_MODEL}gpusPerHost: 0.5\n", "gpusPerHost: 0.5 must be of type integer."),
        (f"{_MODEL}worker: {{cpu: 08}}\n", "worker.cpu: YAML readers disagree about 08; write"),
        (f"{_MODEL}worker: {{cpu: 8}}\n", "worker.cpu: 8 must be text; put it in quotes"),
        (f"{_MODEL}worker: {{nodeSelector: {{gpu: no}}}}\n", "worker.nodeSelector.gpu: false must"),
        (f"{_MODEL}storage: {{size: lots}}\n", "storage.size: 'lots' must be a whole size"),
        (f"{_MODEL}arguments: {{num_block: 1}}\n", "arguments.num_block: the chart has no such"),
        (f"{_MODEL}arguments: {{num_replicas: 2}}\n", "arguments.num_replicas: the chart has no"),
        (
            f"{_MODEL}arguments: {{max_num_seqs: many}}\n",
            "max_num_seqs: 'many' must be of type int",
        ),
        (f"{_MODEL}arguments: {{preemption: no}}\n", "arguments.preemption: false must be one of"),
        (f"{_MODEL}arguments: {{load_seed: 1e3}}\n", "arguments.load_seed: YAML readers disagree"),
        (f"{_MODEL}arguments: {{lease_s: .NaN}}\n", "arguments.lease_s: YAML readers disagree"),
        (f"{_MODEL}image: {{tag: 12e45}}\n", "image.tag: YAML readers disagree about 12e45"),
        (f"{_MODEL}image: {{tag: 0o17}}\n", "image.tag: YAML readers disagree about 0o17"),
        (f"{_MODEL}gangScheduler: {{queue: y}}\n", "gangScheduler.queue: YAML readers disagree"),
        (
            f"{_MODEL}worker: {{nodeSelector: {{on: a}}}}\n",
            "worker.nodeSelector: put the key on in",
        ),
        (f"{_MODEL}worker: {{nodeSelector: {{N: a}}}}\n", "worker.nodeSelector: put the key N in"),
        (
            f"{_MODEL}arguments: {{served_model_name: 1}}\n",
            "served_model_name: 1 must be a name, or",
        ),
        (f"{_MODEL}arguments: {{itl_target_ms: -1}}\n", "itl_target_ms must be above 0"),
        (f"{_MODEL}arguments: {{block_size: 0}}\n", "arguments.block_size: block_size must be"),
        (f"{_MODEL}arguments: {{lease_s: 1}}\n", "arguments.lease_s: lease_s must be at least 5"),
        (
            f"{_MODEL}arguments: {{disk_cache_bytes: 9}}\n",
            "arguments.disk_cache_bytes: the chart has",
        ),
        (f"{_MODEL}diskCache: {{size: 4G}}\n", "diskCache.size: '4G' must be a whole size in Gi"),
        (
            f"{_MODEL}diskCache: {{storageClassName: a}}\n",
            "there is no disk without diskCache.size",
        ),
        (
            f"{_MODEL}tensorParallelSize: 8\ngpusPerHost: 8\nworker: {{cpu: '9'}}\n"
            "diskCache: {size: 7Gi}\n",
            "diskCache.size: 7Gi is not enough for the 8 ranks of a host",
        ),
        (
            f"{_MODEL}diskCache: {{size: 9Gi}}\narguments: {{enable_prefix_cache: false}}\n",
            "arguments.enable_prefix_cache: with false, nothing would be written",
        ),
        (
            f"{_MODEL}diskCache: {{size: 9Gi}}\narguments: {{num_cpu_blocks: 0}}\n",
            "arguments.num_cpu_blocks: with 0, nothing would be written",
        ),
        (f"{_MODEL}worker: null\n", "worker: null removes the chart's value, which is required."),
        (
            f"{_MODEL}gateway: {{enabled: null}}\n",
            "gateway.enabled: null removes the chart's value",
        ),
        (f"{_MODEL}storage: {{size: '{'9' * 5000}Gi'}}\n", "must be a whole size such as 200Gi"),
        ("model: |\n  /models/x\n", r"model: '/models/x\n' must be a Hub id"),
        (f"{_MODEL}download: {{token: hf_x}}\n", "download.token: the chart has no such value; it"),
        (
            f"{_MODEL}download: {{s3: {{key: x}}}}\n",
            "it takes the name of a Secret, and no keys: secr",
        ),
        (
            f"{_MODEL}tensorParallelSize: 12\ngpusPerHost: 8\nworker: {{cpu: '16'}}\n",
            "12 ranks do not fill hosts of 8",
        ),
        (f"{_MODEL}maxReplicas: 1\nreplicas: 2\n", "maxReplicas: it must be 0"),
        (f"{_MODEL}worker: {{cpu: 1500m}}\n", "worker.cpu: 1500m is not enough"),
        (f"{_MODEL}worker: {{sharedMemory: 64Gi}}\n", "must be less than worker.memory, 64Gi"),
        (
            f"{_MODEL}tensorParallelSize: 8\ngpusPerHost: 8\nworker: {{cpu: '9', memory: 32Gi}}\n",
            "worker.sharedMemory: 32Gi (its default) must be less than worker.memory, 32Gi",
        ),
        (f"{_MODEL}worker: {{tolerations: [{{kee: a}}]}}\n", "worker.tolerations.0.kee: the chart"),
        (f"{_MODEL}image: {{repository: 'a/b:1'}}\n", "image.repository: 'a/b:1' must be an image"),
        (f"{_MODEL}download: {{cidrs: [10.0.0.1/8]}}\n", "download.cidrs.0: 10.0.0.1/8 has host"),
        (
            f"{_MODEL}autoscaler: {{apiServerCidrs: [999.0.0.0/8]}}\n",
            "apiServerCidrs.0: 999.0.0.0/8",
        ),
        (f"{_MODEL}worker: {{sharedMemory: 100Mi}}\n", "worker.sharedMemory: 100Mi is not enough"),
        (f"{_MODEL}replicas: 2\nstorage: {{accessMode: ReadWriteOnce}}\n", "for 2 workers"),
        (f"{_MODEL}gcs: {{faultTolerance: rocksdb}}\n", "GCSFaultToleranceEmbeddedStorage"),
        (f"{_MODEL}gateway: {{enabled: true}}\n", "gateway.name: it is required"),
        (
            f"{_MODEL}gateway: {{inferencePool: {{enabled: true}}}}\n",
            "gateway.inferencePool.enabled: it needs gateway.enabled",
        ),
        (f"{_MODEL}graceSeconds: 100\n", "graceSeconds: 100 would end a pod within drainSeconds"),
        (f"{_MODEL}replicas: 1_0\n", "replicas: YAML readers disagree about 1_0"),
        (f"{_MODEL}image: {{tag: 1:30}}\n", 'text in quotes: "1:30"'),
        (f"{_MODEL}storage: {{storageClassName: no}}\n", "storage.storageClassName: false must be"),
        ("model: s3://Bucket/x\n", "model: 's3://Bucket/x' must be a Hub id"),
        ("model: s3://bucket/a/../b\n", "must be a Hub id"),
        ("model: /models/s3/x\n", "must be a Hub id"),
        ("model: /models\n", "model: write a folder below /models"),
        (
            f"{_MODEL}storage: {{image: 'ghcr.io/a/b:1', existingClaim: c}}\n",
            "storage.image: the model has two sources",
        ),
        ("model: s3://bucket/x\nstorage: {image: 'ghcr.io/a/b:1'}\n", "would be downloaded, but"),
        (f"{_MODEL}storage: {{subPath: ../other}}\n", "storage.subPath: '../other' must be"),
        (f"{_MODEL}storage: {{subPath: a..b/c}}\n", "storage.subPath: 'a..b/c' must be"),
        (f"{_MODEL}storage: {{subPath: /models}}\n", "storage.subPath: '/models' must be"),
        (f"{_MODEL}storage: {{subPath: 08}}\n", "storage.subPath: YAML readers disagree"),
        ("model: /opt/x\nstorage: {subPath: team}\n", "storage.subPath: nothing would use it"),
        ("model: /opt/x\nstorage: {existingClaim: a}\n", "storage.existingClaim: nothing would"),
        (
            f"{_MODEL}storage: {{image: 'ghcr.io/a/b:1', subPath: team}}\n",
            "storage.subPath: it is a folder of a claim",
        ),
        (
            f"{_MODEL}storage: {{existingClaim: a, storageClassName: fast}}\n",
            "storage.storageClassName: it is for a claim that the chart creates",
        ),
        (
            "model: /opt/x\nstorage: {image: 'ghcr.io/a/b:1'}\n",
            "model: /opt/x is not in storage.image",
        ),
    ],
)
def test_each_error_is_one_line_with_the_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, error: str
) -> None:
    assert check(tmp_path, text) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{tmp_path / 'values.yaml'}: ")
    assert error in line


def test_a_model_of_the_hub_needs_a_claim_that_can_be_written() -> None:
    values = {"model": "a/b", "storage": {"accessMode": "ReadOnlyMany"}}
    [error] = rules(values)
    assert error.startswith("storage.accessMode: a model cannot be downloaded")


def test_an_incremental_upgrade_needs_the_autoscaler_a_class_and_no_routes() -> None:
    upgrade: Values = {"strategy": "NewClusterWithIncrementalUpgrade"}
    gateway = {"enabled": True, "name": "one"}
    errors = rules({"model": "/models/x", "upgrade": upgrade, "gateway": gateway})
    assert [error.split(":")[0] for error in errors] == [
        "upgrade.strategy",
        "upgrade.strategy",
        "upgrade.incremental.gatewayClassName",
    ]
    incremental = read_values([_CHART / "values.yaml"], _CHART)["upgrade"]["incremental"]
    upgrade["incremental"] = incremental | {"gatewayClassName": "envoy"}
    values: Values = {"model": "/models/x", "upgrade": upgrade, "maxReplicas": 2}
    assert rules(values) == []
    upgrade["incremental"] |= {"stepSizePercent": 50, "maxSurgePercent": 20}
    [error] = rules(values)
    assert error.startswith("upgrade.incremental.stepSizePercent: KubeRay rejects 50")


@pytest.mark.parametrize(("size", "num_errors"), [("1Ti", 0), ("800Gi", 0), ("780Gi", 1)])
def test_the_claim_must_hold_the_weights(size: str, num_errors: int) -> None:
    values = {"model": "/models/x", "storage": {"size": size}}
    # Llama 3.1 405B in bfloat16 has 756 GiB.
    errors = rules(values, weight_bytes=2 * 405_853_388_800)
    assert len(errors) == num_errors
    assert all("the weights have 756.0 GiB, use 794Gi" in error for error in errors)


def test_the_size_is_that_of_the_files_in_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors", "other.bin"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**30)
    text = f"{_MODEL}storage: {{size: 2Gi}}\n"
    assert check(tmp_path, text, "--checkpoint", str(tmp_path)) == 1
    assert "the weights have 2.0 GiB, use 3Gi" in capsys.readouterr().out


def test_an_index_alone_states_the_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = {"metadata": {"total_size": 3 * 2**30}, "weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    text = f"{_MODEL}storage: {{size: 2Gi}}\n"
    assert check(tmp_path, text, "--checkpoint", str(tmp_path)) == 1
    assert "the weights have 3.0 GiB, use 4Gi" in capsys.readouterr().out


def test_the_size_in_s3_is_that_of_the_listed_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small_s3: SmallS3
) -> None:
    small_s3.push("team/tiny", {"model-1.safetensors": b"", "original/x.safetensors": b""})
    small_s3.listed_sizes["team/tiny/model-1.safetensors"] = 3 * 2**30
    small_s3.listed_sizes["team/tiny/original/x.safetensors"] = 3 * 2**30
    text = "model: s3://models/team/tiny\nstorage: {size: 2Gi}\n"
    assert check(tmp_path, text) == 1
    assert "the weights have 3.0 GiB, use 4Gi" in capsys.readouterr().out
    small_s3.faults.append(Fault("/models", times=99, status=403))
    assert check(tmp_path, text) == 0
    assert "The size of the weights is not checked: S3 denies" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["P", "p" * 48, "1p", "p-", "p.q"])
def test_a_release_has_a_name_that_kuberay_accepts(name: str) -> None:
    [error] = rules({"model": "/models/x"}, release=name)
    assert error.startswith("--release: ")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("model: /models/x\nmodel: /models/y\n", "it has a duplicate key"),
        ("- model\n", "must have lines such as"),
        ("model: [\n", "is not valid YAML"),
        ("model: &a [*a]\n", "the value a contains itself"),
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


def test_a_mapping_may_change_what_it_merges(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(f"{_MODEL}worker: {{<<: &a {{cpu: '4', memory: 9Gi}}, cpu: '16'}}\n")
    worker = read_values([path], _CHART)["worker"]
    assert (worker["cpu"], worker["memory"]) == ("16", "9Gi")


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
    assert schema_errors(defaults | {"model": "a/b"}, _CHART) == []
    # Helm removes a default that is null, and then a template fails without its name.
    assert _required_paths(schema) == _paths(defaults)


def rules(
    values: Values, *, release: str = "pagedray", weight_bytes: int | None = None
) -> list[str]:
    """Return the errors of values with the defaults of the chart."""
    defaults = read_values([_CHART / "values.yaml"], _CHART)
    merged = {
        name: one | values.get(name, {}) if isinstance(one, dict) else values.get(name, one)
        for name, one in defaults.items()
    }
    assert schema_errors(merged, _CHART) == []
    return list(rule_errors(merged, release=release, weight_bytes=weight_bytes))


def _paths(values: Mapping[str, object], prefix: str = "") -> set[str]:
    paths = set()
    for name, value in values.items():
        # Mappings of the user's own keys are values as a whole.
        if isinstance(value, dict) and value and name != "podLabels":
            paths |= _paths(value, f"{prefix}{name}.")
        else:
            paths.add(f"{prefix}{name}")
    return paths


def _schema_paths(schema: Values, prefix: str = "") -> set[str]:
    paths = set()
    for name, one in schema["properties"].items():
        if "properties" in one and name != "arguments":
            paths |= _schema_paths(one, f"{prefix}{name}.")
        else:
            paths.add(f"{prefix}{name}")
    return paths


def _required_paths(schema: Values, prefix: str = "") -> set[str]:
    paths = set()
    for name in schema["required"]:
        one = schema["properties"][name]
        is_inner = "properties" in one and name != "arguments"
        paths |= _required_paths(one, f"{prefix}{name}.") if is_inner else {f"{prefix}{name}"}
    return paths
