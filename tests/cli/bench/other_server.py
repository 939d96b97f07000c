"""A second implementation of OpenAI's wire: what servers do that ours does not."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.quiet_server import QuietHandler, serving_by

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NUM_TOKENS", "OtherServer", "serving"]

NUM_TOKENS = 5


class OtherServer:
    """The requests that a server received, and how it behaves."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self.status = 200
        self.rejected_after: int | None = None
        """How many requests are answered before the rest is rejected."""
        self.ends_early = False
        self.fails_in_stream = False


def _metrics(num_requests: int) -> str:
    """Return metrics of vLLM, of two engines; each request has the same drafts."""
    lines = ["# HELP vllm:spec_decode_num_drafts_total Number of drafts."]
    for name, number in (("drafts", 2), ("draft_tokens", 8), ("accepted_tokens", 5)):
        for engine in range(2):
            label = f'{{engine="{engine}",model_name="m"}}'
            lines.append(f"vllm:spec_decode_num_{name}_total{label} {number * num_requests:.1f}")
            lines.append(f"vllm:spec_decode_num_{name}_created{label} 1.7e+09")
    return "\n".join(lines) + "\n"


@contextmanager
def serving() -> Iterator[OtherServer]:
    state = OtherServer()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self.answer(200, _metrics(len(state.bodies)).encode())
                return
            self.answer(200, b'{"data": [{"id": "other-model"}]}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == "/tokenize":
                self.answer(404, b"<html>")
                return
            state.bodies.append(body)
            state.headers.append({name.lower(): value for name, value in self.headers.items()})
            rejected = state.rejected_after is not None and len(state.bodies) > state.rejected_after
            if rejected or state.status != 200:
                text = json.dumps({"error": {"message": "No such\nkey.", "code": None}})
                self.answer(state.status if state.status != 200 else 429, text.encode())
                return
            self._stream(is_chat=self.path.endswith("/chat/completions"))

        def _stream(self, *, is_chat: bool) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            if is_chat:
                self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            self.wfile.write(b": a comment\r\n\r\n")
            for _ in range(NUM_TOKENS):
                piece = {"delta": {"content": "é"}} if is_chat else {"text": "é"}
                self._event({"choices": [{"index": 0, **piece}], "usage": None})
            if state.fails_in_stream:
                self._event({"error": {"message": "It broke."}})
            if state.ends_early:
                return
            self.wfile.write(b"data: [DONE]\r\n\r\n")

        def _event(self, data: object) -> None:
            # Its lines end as on Windows, and an event arrives in two parts.
            text = f"data:{json.dumps(data, ensure_ascii=False)}\r\n\r\n".encode()
            self.wfile.write(text[:20])
            self.wfile.flush()
            self.wfile.write(text[20:])

    with serving_by(Handler) as state.url:
        yield state
