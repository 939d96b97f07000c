"""Long work in a thread pauses for others; on the event loop, where it is short, it does not."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from cluster.serving.text.chat_template import ChatMessage

if TYPE_CHECKING:
    import pytest

    from cluster.serving.text.tokenizer import Tokenizer

PROPERTIES = {f"<{number}>": {"type": "string"} for number in range(2000)}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PROPERTIES}}] * 5
MESSAGES = [ChatMessage("user", "x")]


def test_marking_of_tools_pauses_in_a_thread(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: Counter[int] = Counter()
    sleep = time.sleep

    def counted_sleep(seconds: float) -> None:
        # Threads of earlier tests may sleep as well.
        pauses[threading.get_ident()] += 1
        sleep(seconds)

    def num_pauses() -> int:
        tokenizer.render_marked_chat(MESSAGES, tools=TOOLS, marks_special_tokens=True)
        return pauses[threading.get_ident()]

    monkeypatch.setattr(time, "sleep", counted_sleep)
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(num_pauses).result() >= 5
    assert num_pauses() == 0
