"""Large bodies with invalid entries are rejected quickly, with a short message."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import httpx
import pytest

if TYPE_CHECKING:
    from tests.serving.conftest import Server


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"tiny","prompt":[' + b"5," * 500_000 + b"5]}",
        b'{"model":"tiny","prompt":["a",' + b"5," * 500_000 + b"5]}",
        b'{"model":"tiny","prompt":"x","stop":[' + b"5," * 500_000 + b"5]}",
        b'{"model":"tiny","prompt":"x","logit_bias":{'
        + b",".join(b'"%d":"a"' % number for number in range(90_000))
        + b"}}",
        b'{"model":"tiny","messages":[' + b"5," * 500_000 + b"5]}",
        b'{"model":"tiny","messages":[{' + b'"a":1,' * 200_000 + b'"b":1}]}',
    ],
    ids=["tokens", "mixed", "stop", "bias", "messages", "fields"],
)
def test_large_bodies_are_rejected_quickly(server: Server, body: bytes) -> None:
    path = "chat/completions" if b"messages" in body else "completions"
    headers = {"content-type": "application/json"}
    started_s = time.process_time()
    answer = httpx.post(f"{server.url}/v1/{path}", content=body, headers=headers, timeout=60)
    assert answer.status_code == 400
    assert len(answer.content) < 500
    assert time.process_time() - started_s < 15
    assert server.engine.log.submitted == []
