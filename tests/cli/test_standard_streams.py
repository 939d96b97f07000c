"""Commands that are started without standard streams, or in a folder that was removed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from cluster.engine.progress import progress_reports
from tests.system.server_process import ROOT, TINY_LLAMA

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SHOW_STREAMS = """
import os, sys
from cluster.cli.process import open_standard_streams
open_standard_streams()
print("lost", file=sys.stderr, flush=True)
with open(sys.argv[1], "w") as file:
    for descriptor in range(3):
        print(os.readlink(f"/proc/self/fd/{descriptor}"), file=file)
        assert os.get_inheritable(descriptor)
"""


def run_without(closed: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python without some of its streams, such as `>&- 2>&-`."""
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("closed", "opened"), [("2>&-", [2]), (">&- 2>&-", [1, 2]), ("<&- >&- 2>&-", [0, 1, 2])]
)
def test_streams_that_are_closed_are_the_null_device(
    tmp_path: Path, closed: str, opened: Sequence[int]
) -> None:
    done = run_without(closed, "-c", SHOW_STREAMS, str(tmp_path / "streams"))
    assert done.returncode == 0
    shown = (tmp_path / "streams").read_text().splitlines()
    assert [n for n in range(3) if shown[n] == os.devnull and n in opened] == opened


def test_a_program_without_standard_error_has_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with progress_reports(are_shown=True) as report:
        report("Loading weights", 0.5)


def test_a_command_runs_without_standard_error_in_a_removed_folder(tmp_path: Path) -> None:
    folder = tmp_path / "release"
    folder.mkdir()
    generate = f"{sys.executable} -P -m cluster.cli generate {TINY_LLAMA} 'def f' --max-tokens=2"
    done = subprocess.run(
        ["sh", "-c", f"rmdir {folder} && exec {generate} 2>&-"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout[:5]) == (0, "def f")
