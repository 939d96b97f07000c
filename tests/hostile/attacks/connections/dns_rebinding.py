"""Requests of a web page whose site has become an address of this machine."""

from __future__ import annotations

import json
import time
from http.client import HTTPConnection
from typing import TYPE_CHECKING

from tests.hostile.attack import Attack, Findings

if TYPE_CHECKING:
    from tests.hostile.attack import Target

__all__ = ["DnsRebinding"]

_CHAT_PATH = "/v1/chat/completions"
_CHAT = {"model": "tiny-llama", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
_PAGES = (
    {"Host": "evil.example"},
    {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"},
    {"Host": "127.0.0.1.evil.example", "Origin": "http://127.0.0.1.evil.example"},
    {"Host": "127.0.0.1", "Origin": "http://evil.example"},
    {"Host": "localhost", "Origin": "http://localhost:3000"},
    {"Host": "127.0.0.1", "Origin": "null"},
)


class DnsRebinding(Attack):
    """What a browser sends for a page of another site, to a server that requires no keys."""

    name = "pages of other sites"
    has_keys = False

    def run(self, target: Target, seconds: float) -> Findings:
        """Send each, again and again; none may be served."""
        end_s = time.monotonic() + seconds
        num_sent, broken = 0, set()
        while not num_sent or time.monotonic() < end_s:
            for page in _PAGES:
                for path in ("/", "/loads", _CHAT_PATH):
                    status = _status(target.http_port, path, page)
                    num_sent += 1
                    if status not in (403, 421):
                        broken.add(f"{path} with {page} was answered with {status}")
        return Findings(figures={"requests": num_sent}, broken=tuple(broken))


def _status(port: int, path: str, headers: dict[str, str]) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=60.0)
    try:
        if path == _CHAT_PATH:
            headers = {**headers, "Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(_CHAT), headers)
        else:
            connection.request("GET", path, None, headers)
        return connection.getresponse().status
    finally:
        connection.close()
