"""Grammars that compile quickly, but whose masks take longer for each token."""

from __future__ import annotations

import json
import time
from http.client import HTTPConnection
from typing import TYPE_CHECKING

from tests.hostile.attack import Attack, Findings

if TYPE_CHECKING:
    from tests.hostile.attack import Target

__all__ = ["CostlyGrammar"]

_GRAMMAR = """
root ::= (a | b)*
a ::= ("x" | "xx" | "xxx")*
b ::= ("x" a | a "x")*
"""
_ANSWER_S = 180.0
_SHORT_S = 3.0
"""How long a short run waits for an answer."""
_BODY = {
    "model": "tiny-llama",
    "prompt": "x",
    "guided_grammar": _GRAMMAR,
    "max_tokens": 900,
    "ignore_eos": True,
}


class CostlyGrammar(Attack):
    """Completions that follow a grammar with more derivations of a text at each token."""

    name = "a grammar with costly masks"

    def run(self, target: Target, seconds: float) -> Findings:
        """Generate with it repeatedly; each answer must give the reason for the rejection."""
        end_s = time.monotonic() + seconds
        num_sent, broken = 0, set()
        # The masks have only what others leave of the server's core.
        timeout_s = _ANSWER_S if seconds >= self.full_s else _SHORT_S
        connection = HTTPConnection("127.0.0.1", target.http_port, timeout=timeout_s)
        headers = {"Authorization": f"Bearer {target.key}", "Content-Type": "application/json"}
        while not num_sent or time.monotonic() < end_s:
            num_sent += 1
            connection.request("POST", "/v1/completions", json.dumps(_BODY), headers)
            try:
                response = connection.getresponse()
            except TimeoutError:
                if timeout_s == _ANSWER_S:
                    broken.add(f"it was not answered within {timeout_s} s")
                break
            answer = response.read().decode()
            if response.status != 400 or "cannot follow its structure" not in answer:
                broken.add(f"it was answered with {response.status}: {answer:.200}")
        connection.close()
        return Findings(figures={"requests": num_sent}, broken=tuple(broken))
