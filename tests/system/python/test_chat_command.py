"""`pagedray chat`, as another program runs it: messages are lines of standard input."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import pytest

from cluster.cli.commands import main
from pagedray import LLM, SamplingParams
from tests.cli.terminal_emulator import Terminal
from tests.fakes import wait_for

TINY_LLAMA = str(Path(__file__).parents[3] / "examples" / "tiny-llama")
FLAGS = ("--dtype=float32", "--max-tokens=8", "--temperature=0")
SYSTEM = {"role": "system", "content": "Answer in one word."}
QUESTION = {"role": "user", "content": "What does open do?"}


def _answers(*messages: list[dict[str, str]]) -> list[str]:
    with LLM(TINY_LLAMA, executor="local", dtype="float32") as llm:
        results = llm.chat(
            list(messages), SamplingParams(max_tokens=8, temperature=0.0), use_tqdm=False
        )
        return [result.outputs[0].text for result in results]


def test_output_has_only_the_answers_to_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, with_system = _answers([QUESTION], [SYSTEM, QUESTION])
    assert plain != with_system
    for flags, answer in (((), plain), (("--system-prompt", SYSTEM["content"]), with_system)):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION['content']}\n"))
        assert main(["chat", TINY_LLAMA, *FLAGS, *flags]) == 0
        printed = capsys.readouterr()
        assert printed.out == f"{answer}\n"
        assert re.search(r"\[8 tokens, [\d.]+ tokens/s, first after \d+ ms, cut at", printed.err)


def test_input_that_is_closed_or_not_text_ends_without_a_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["chat", TINY_LLAMA, *FLAGS]) == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert main(["chat", TINY_LLAMA, *FLAGS]) == 2
    assert capsys.readouterr().err.endswith("pagedray: error: The message is not UTF-8.\n")


def test_ctrl_c_stops_an_answer_and_keeps_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY_LLAMA, folder)
    # Answers do not end before their maximum length.
    for path in folder.glob("*config.json"):
        settings = json.loads(path.read_text())
        for name in {"eos_token_id", "eos_token"} & set(settings):
            del settings[name]
        path.write_text(json.dumps(settings))
    flags = ("--dtype=float32", "--executor=local", "--max-tokens=900", "--temperature=1")
    with Terminal(["chat", str(folder), *flags]) as terminal:
        wait_for(lambda: "/help lists commands" in terminal.text, 120.0)
        for number in (1, 2):
            size = len(terminal.written)
            terminal.press(b"What does open do?\r")
            # More than the message, which appears twice if it was typed before the prompt was read.
            wait_for(lambda: len(terminal.written) > size + 150)  # noqa: B023
            terminal.press(b"\x03")
            wait_for(lambda: terminal.written.count(b"Stopped after ") == number)  # noqa: B023
        # A terminal may lose what is typed before the prompt is read.
        wait_for(lambda: terminal.written.endswith(b"> "))
        terminal.press(b"\x04")
        assert terminal.process.wait(60.0) == 0


def test_a_model_without_chat_template_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY_LLAMA, folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["chat_template"]
    path.write_text(json.dumps(settings))
    assert main(["chat", str(folder), *FLAGS]) == 2
    assert "no chat template; use `pagedray generate`" in capsys.readouterr().err
