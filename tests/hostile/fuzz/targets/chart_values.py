"""Helm values, which `pagedray deploy check` reads."""

from __future__ import annotations

from pathlib import Path

from cluster.cli.deploy.rules import rule_errors
from cluster.cli.deploy.values import read_values, schema_errors, spelling_errors
from pagedray.errors import StartupError
from tests.hostile.fuzz.scratch import scratch_folder
from tests.hostile.fuzz.target import Target

_FOLDER = scratch_folder()
_CHART = Path(__file__).parents[4] / "deploy" / "helm" / "pagedray"


def run(data: bytes) -> None:
    """Return errors of one line each, or StartupError."""
    path = Path(_FOLDER, "values.yaml")
    path.write_bytes(data)
    try:
        values = read_values([path], _CHART)
        lines = spelling_errors(path) or schema_errors(values, _CHART)
        if not lines:
            lines = list(rule_errors(values, release="a", weight_bytes=2**34))
    except StartupError as error:
        lines = [str(error)]
    for line in lines:
        assert "\n" not in line, repr(line)
        assert len(line) < 2000, repr(line)


TARGET = Target(
    run=run,
    seeds=(
        b'model: Qwen/Qwen3-8B\nworker:\n  cpu: "8"\n  memory: 64Gi\n  gpus: 1\n',
        b"model: /models/a\narguments: {max_num_seqs: 64}\nstorage: null\n",
        b"model: a/b\ndiskCache: {size: 4Gi}\nworker: {tolerations: [{key: a}]}\n",
        b"model: a/b\ndownload: {cidrs: [10.0.0.0/8]}\narguments: {num_cpu_blocks: 0}\n",
        b"model: s3://b/c\na: &a [1]\nb: *a\n<<: {c: 0755}\n",
    ),
    words=(
        *(b"replicas: ", b"image:\n  ", b"null", b"~", b"!!binary ", b"&a ", b"*a", b"<<: "),
        *(b"2026-11-25", b"1:30", b"0o7", b"? ", b"- ", b"|\n", b"\x85", b"\xe2\x80\xa8", b"%YAML"),
        *(b".inf", b".nan", b"1e400", b"9" * 5000, b"storage:\n  size: 100Gi\n", b"arguments:\n  "),
    ),
    max_bytes=1024,
)
