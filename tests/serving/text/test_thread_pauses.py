"""Long work in a thread pauses for others."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from cluster.serving.text.templates.chat_prompt import ChatMessage, ChatPrompt
from cluster.serving.text.thread_pauses import ThreadPauses

if TYPE_CHECKING:
    from cluster.serving.text.tokenizer import Tokenizer

PROPERTIES = {f"<{number}>": {"type": "string"} for number in range(2000)}
TOOLS = ({"type": "function", "function": {"name": "f", "parameters": PROPERTIES}},) * 5
MESSAGES = (ChatMessage("user", "x"),)


@pytest.fixture
def slept_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each pause of this thread is."""
    found: list[float] = []
    own = threading.get_ident()

    def note_sleep(seconds: float) -> None:
        # Threads of earlier tests may sleep as well.
        if threading.get_ident() == own:
            found.append(seconds)

    monkeypatch.setattr(time, "sleep", note_sleep)
    return found


def test_marking_of_tools_takes_pauses(tokenizer: Tokenizer, slept_s: list[float]) -> None:
    prompt = ChatPrompt(MESSAGES, TOOLS)
    tokenizer.render_marked_chat(prompt, marks_special_tokens=True)
    assert not slept_s
    pauses = ThreadPauses(are_long=False)
    tokenizer.render_marked_chat(prompt, marks_special_tokens=True, pauses=pauses)
    assert len(slept_s) >= 5


def test_templates_take_pauses(tokenizer: Tokenizer, slept_s: list[float]) -> None:
    prompt = ChatPrompt(MESSAGES * 4096)
    tokenizer.render_chat(prompt)
    assert not slept_s
    tokenizer.render_chat(prompt, pauses=ThreadPauses(are_long=True))
    assert len(slept_s) >= 5
    assert min(slept_s) > ThreadPauses(are_long=False).pause_s
