"""Programs that people run describe themselves with `--help`, and then do nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.system.server_process import ROOT

RUN_BY_PROGRAMS = (
    "bench/cpu_int4/llama_cpp_server.py",
    "tests/clients/programs/",
    "tests/deploy/logging_replica.py",
    "tests/hostile/fuzz/fuzz_target.py",
    "tests/shared_ray.py",
    "tests/structured/fake_masks.py",
    "tests/system/faults/other_node.py",
    "tests/workers/parallel/",
)
"""Their arguments come from other programs and tests."""


def programs() -> list[str]:
    """Return the module names of all programs that people run."""
    paths = {
        path.relative_to(ROOT).as_posix(): path
        for folder in ("bench", "deploy", "scripts", "tests")
        for path in (ROOT / folder).rglob("*.py")
    }
    return sorted(
        name.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
        for name, path in paths.items()
        if 'if __name__ == "__main__":\n' in path.read_text()
        and not name.startswith(RUN_BY_PROGRAMS)
    )


@pytest.mark.slow
@pytest.mark.parametrize("program", programs())
def test_a_program_describes_itself(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", program, "--help"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")
