"""`pagedray generate`: parameters of the command line, of generation_config.json, greedy ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.cli.commands import main

TINY_LLAMA = Path(__file__).parents[3] / "examples" / "tiny-llama"
COMMAND = ("generate", str(TINY_LLAMA), "class Queue:", "--dtype=float32", "--seed=1", "--json")


def test_unset_parameters_are_those_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def text(*flags: str) -> str:
        assert main([*COMMAND, "--max-tokens=8", *flags]) == 0
        return str(json.loads(capsys.readouterr().out)["text"])

    (tmp_path / "generation_config.json").write_text('{"temperature": 1.5}')
    file = f"--generation-config={tmp_path}"
    greedy = text()
    assert text(file) == text("--temperature=1.5") != greedy
    assert text(file, "--temperature=0") == greedy


def test_values_are_checked_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND[:1], "absent", "a", "--temperature=-1"]) == 2
    assert "temperature" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [COMMAND[:3], ("chat", COMMAND[1]), ("bench", "latency", COMMAND[1])]
)
def test_a_model_that_embeds_is_rejected_before_it_is_loaded(
    command: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--task=embed", "--device=cpu"]) == 2
    message = "The task of tiny-llama is embed, but this command generates text; use "
    assert capsys.readouterr().err.startswith(f"pagedray: error: {message}")
