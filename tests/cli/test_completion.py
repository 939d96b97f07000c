"""`pagedray completion`: scripts that complete commands, flags, values and paths."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from cluster.cli.commands import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_flags(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("serve", "bench", "--max-model-len", "--tool-call-format"):
        assert word in script
    # Flags of vLLM that are hidden from the help are hidden here too.
    assert "--pipeline-parallel-size" not in script


def test_bash_completes_paths_and_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "more.yaml").touch()
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    for line, expected in (
        ("serve mo", "models"),
        ("serve models --max-mo", "--max-model-len"),
        ("serve --config mo", "models more.yaml"),
        ("bench serve --backend grpc-", "grpc-chat"),
        ("chat models --generation-config m", "models"),
    ):
        program = (
            f"source {script}; COMP_WORDS=(pagedray {line});"
            "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _shtab_pagedray; echo ${COMPREPLY[@]}"
        )
        done = subprocess.run(
            ["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == expected.split(), line
