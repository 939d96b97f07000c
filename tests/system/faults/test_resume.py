"""Streams of a real server are resumed, also if a rank dies while no client is connected."""

import asyncio
import json
from typing import Any

import pytest

from tests.serving.resume.test_cut_connections import Answer, ask, cutting_proxy
from tests.system.server_process import ServerProcess

PROMPTS = ("def parse_date(text):", "import os", "class Queue:", "for line in file:")
NUM_BYTES = 3000
"""Bytes of a response after which its connection is cut, about ten events."""


def body(prompt: str) -> dict[str, Any]:  # Any: JSON
    return {
        "model": "tiny-llama", "prompt": prompt, "max_tokens": 200, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"resumable": True},
    }  # fmt: skip


def text_of(events: list[tuple[int, str]]) -> str:
    assert [number for number, _ in events] == list(range(1, len(events) + 1))
    assert events[-1][1] == "[DONE]"
    chunks = [json.loads(data)["choices"][0] for _, data in events[:-1]]
    assert chunks[-1]["finish_reason"] == "length"
    return "".join(chunk["text"] for chunk in chunks)


async def cut(server: ServerProcess, prompt: str) -> Answer:
    async with cutting_proxy(server.http_port) as proxy:
        proxy.cut_next(NUM_BYTES)
        headers = {"x_request_id": str(PROMPTS.index(prompt))}
        answer = await ask(proxy.port, "POST", "/v1/completions", body(prompt), **headers)
    assert not answer.is_complete
    return answer


async def resumed(server: ServerProcess, prompt: str, answer: Answer) -> str:
    path, number = f"/v1/streams/{PROMPTS.index(prompt)}", len(answer.events)
    rest = await ask(server.http_port, "GET", path, last_event_id=str(number))
    assert rest.is_complete
    return text_of(answer.events + rest.events)


@pytest.mark.slow
async def test_streams_are_resumed_after_a_rank_died_meanwhile() -> None:
    # In bfloat16, what is computed again is rounded differently, which can change a token.
    engine = ("--tensor-parallel-size=2", "--num-threads=1", "--dtype=float32")
    with ServerProcess((*engine, "--resume-anonymous")) as server:
        wanted = [
            await ask(server.http_port, "POST", "/v1/completions", body(prompt))
            for prompt in PROMPTS
        ]
        cuts = await asyncio.gather(*(cut(server, prompt) for prompt in PROMPTS))
        server.ranks()[0].kill()
        found = await asyncio.gather(
            *(resumed(server, *pair) for pair in zip(PROMPTS, cuts, strict=True))
        )
        assert found == [text_of(answer.events) for answer in wanted]
        assert server.metrics()['pagedray_stream_resumes_total{frontend="http"}'] == len(PROMPTS)
        assert server.metrics()['pagedray_rank_replacements_total{cause="death"}'] >= 1
