"""Every kernel is compiled for a Hopper GPU, by the program `compile.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[4]
MAX_SHARED = 227 * 1024
"""Bytes that a program of such a GPU can have."""
SOME = (
    "experts",
    "persistent, gated",
    "persistent, rotated",
    "skinny fp8",
    "quantized rows",
    "attention, sinks",
)
PERSISTENT = {"persistent, gated": 2, "persistent, rotated": 1}
"""How many kernels serve every number of rows."""
MAX_SPILLED = 256
"""Bytes of registers that a program may keep in memory: more would cost what tiles gain."""


def compiled(*cases: str) -> list[dict[str, Any]]:  # Any: JSON values
    """Return what the program prints of these cases, or of all."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-m", "tests.attention.kernels.hopper.compile", *cases],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return [json.loads(line) for line in process.stdout.splitlines()]


@pytest.mark.parametrize(
    "cases", [SOME, pytest.param((), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_kernels_fit_a_hopper_gpu(cases: tuple[str, ...]) -> None:
    kernels = compiled(*cases)
    assert {one["case"] for one in kernels} >= set(cases or SOME)
    assert [one for one in kernels if one["shared"] > MAX_SHARED] == []
    assert [one for one in kernels if one["spilled"] > MAX_SPILLED] == []
    # A step with another number of rows must not wait for a kernel to be compiled.
    assert {case: sum(one["case"] == case for one in kernels) for case in PERSISTENT} == PERSISTENT
