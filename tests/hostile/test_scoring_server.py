"""A server that scores beside floods of one tenant: the other one gets its scores.

Times are not asserted, since the machine may be busy; `-s` prints them.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from tests.hostile.attack import Target
from tests.hostile.floods import PostFlood
from tests.load.measured_server import write_keys
from tests.load.report import times_ms
from tests.system.models.test_rerank import DOCUMENTS, QUERY, save_qwen3
from tests.system.server_process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

_BEFORE_S = 1.0
_ATTACK_S = 3.0
_MAX_GROWTH_MIB = 128.0
"""The queue's pairs, bodies being read, and the largest step's tensors."""


def _body(documents: list[object]) -> bytes:
    return json.dumps({"model": "reranker", "query": QUERY, "documents": documents}).encode()


_FLOOD = PostFlood(
    name="2 048 documents",
    path="/v1/rerank",
    body=lambda: _body(["no, yes"] * 2048),
    allowed=frozenset(("200", "400", "413", "429")),
)
_LONG = replace(_FLOOD, name="64 documents of 16 KB", body=lambda: _body(["yes no " * 2400] * 64))
_INVALID = replace(
    _FLOOD,
    name="documents of which one is no text",
    body=lambda: _body(["no, yes"] * 2047 + [1]),
    allowed=frozenset(("400", "413", "429")),
)


@pytest.fixture(scope="module")
def scoring(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[ServerProcess, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("reranker")
    save_qwen3(folder)
    given = write_keys(folder / "keys.toml", "honest", "hostile")
    arguments = (
        "--executor=local",
        "--task=score",
        "--log-level=warning",
        "--dtype=float32",
        "--num-threads=1",
        "--served-model-name=reranker",
        f"--api-keys={folder / 'keys.toml'}",
    )
    with ServerProcess(arguments, folder) as server:
        yield server, given


def _score_until(end_s: float, url: str, key: str) -> tuple[list[float], list[list[float]]]:
    """Return the seconds and the scores of an honest tenant's requests, at least one."""
    seconds: list[float] = []
    scores: list[list[float]] = []
    body = {"model": "reranker", "query": QUERY, "documents": DOCUMENTS}
    with httpx.Client(timeout=60.0, headers={"authorization": f"Bearer {key}"}) as client:
        while not seconds or time.monotonic() < end_s:
            started_s = time.monotonic()
            answer = client.post(f"{url}/v1/rerank", json=body)
            seconds.append(time.monotonic() - started_s)
            assert answer.status_code == 200, answer.text
            results = sorted(answer.json()["results"], key=lambda one: one["index"])
            scores.append([one["relevance_score"] for one in results])
    return seconds, scores


@pytest.mark.slow
@pytest.mark.parametrize("flood", [_FLOOD, _LONG, _INVALID], ids=lambda flood: flood.name)
def test_an_honest_tenant_gets_its_scores_beside_a_flood(
    scoring: tuple[ServerProcess, dict[str, str]], flood: PostFlood
) -> None:
    server, given = scoring
    process = psutil.Process(server.pid)
    alone_s, alone = _score_until(time.monotonic() + _BEFORE_S, server.url, given["honest"])
    before_bytes = process.memory_info().rss
    target = Target(http_port=server.http_port, grpc_port=server.grpc_port, key=given["hostile"])
    with ExitStack() as stack:
        attacker = stack.enter_context(ThreadPoolExecutor(1))
        attacking = attacker.submit(flood.run, target, _ATTACK_S)
        beside_s, beside = _score_until(time.monotonic() + _ATTACK_S, server.url, given["honest"])
        findings = attacking.result()
    grown_mib = (process.memory_info().rss - before_bytes) / 2**20
    print(flood.name, times_ms(alone_s), times_ms(beside_s), f"{grown_mib:.0f} MiB", findings)
    assert findings.broken == ()
    for scores in (*alone, *beside):
        assert scores == pytest.approx(alone[0], abs=1e-5)
    assert grown_mib < _MAX_GROWTH_MIB
