"""Calls of many sequences whose clients leave at once."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.hostile.attack import Attack, Findings

if TYPE_CHECKING:
    from tests.hostile.attack import Target

__all__ = ["CancelledCalls"]

_NUM_CONNECTIONS = 16
_STAY_S = 0.02
_BODY = {
    "model": "tiny-llama",
    "prompt": "x" * 200,
    "n": 128,
    "max_tokens": 500,
    "stream": True,
}


class CancelledCalls(Attack):
    """Each costs its client 300 bytes, and the server 128 sequences."""

    name = "cancelled calls of 128 sequences"

    def run(self, target: Target, seconds: float) -> Findings:
        """Send and leave on several connections."""
        body = json.dumps(_BODY).encode()
        request = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {target.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        end_s = time.monotonic() + seconds

        def send_until_end() -> int:
            num_sent = 0
            while time.monotonic() < end_s:
                with socket.create_connection(("127.0.0.1", target.http_port), 30.0) as connection:
                    connection.sendall(request)
                    connection.settimeout(_STAY_S)
                    with suppress(OSError):
                        connection.recv(2**10)
                num_sent += 1
            return num_sent

        with ThreadPoolExecutor(_NUM_CONNECTIONS) as threads:
            runs = [threads.submit(send_until_end) for _ in range(_NUM_CONNECTIONS)]
            return Findings(figures={"calls": sum(one.result() for one in runs)})
