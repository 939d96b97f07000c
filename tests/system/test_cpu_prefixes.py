"""A server whose device pool holds one conversation, and whose CPU pool holds them all."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.system.server_process import ServerProcess

NUM_TURNS = 3
OPTIONS = (
    # In bfloat16 some CPUs round matmuls differently at other batch sizes.
    "--dtype=float32",
    "--num-blocks=32",
    "--max-model-len=480",
    "--num-cpu-blocks=512",
    # Whatever was evicted is copied back.
    "--preemption=swap",
)


@pytest.fixture(
    scope="module",
    params=["--executor=local", "--tensor-parallel-size=2"],
    ids=["one rank", "two ranks"],
)
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with ServerProcess((request.param, *OPTIONS)) as process:
        yield process


def continued(server: ServerProcess, prompt: list[int], *, salt: str) -> tuple[list[int], int]:
    """Return the tokens that follow a prompt, and how many of its tokens were cached."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model="tiny-llama",
            prompt=prompt,
            max_tokens=24,
            temperature=0.0,
            extra_body={"ignore_eos": True, "return_token_ids": True, "cache_salt": salt},
        )
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    num_cached = 0 if details is None else details.cached_tokens or 0
    return answer.choices[0].model_dump()["token_ids"], num_cached


def turns_of(server: ServerProcess, number: int, *, salt: str) -> tuple[list[list[int]], list[int]]:
    """Return the answers of a conversation and the cached tokens of each turn.

    With a salt for each turn nothing is cached.
    """
    draws = random.Random(number)
    prompt = [draws.randrange(10, 3000) for _ in range(200)]
    answers, cached = [], []
    for turn in range(NUM_TURNS):
        answer, num_cached = continued(server, prompt, salt=salt.format(turn))
        answers.append(answer)
        cached.append(num_cached)
        prompt += [*answer, *(draws.randrange(10, 3000) for _ in range(20))]
    return answers, cached


@pytest.mark.slow
def test_conversations_that_take_each_others_place_get_the_same_tokens(
    server: ServerProcess,
) -> None:
    alone = [turns_of(server, number, salt=f"{number} {{}}") for number in range(4)]
    assert all(cached == [0] * NUM_TURNS for _, cached in alone)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda n: turns_of(server, n, salt="same"), range(4)))
    assert [answers for answers, _ in together] == [answers for answers, _ in alone]
    # The CPU pool has all of them, and the device only one.
    again = [turns_of(server, number, salt="same") for number in range(4)]
    assert [answers for answers, _ in again] == [answers for answers, _ in alone]
    assert all(num >= 192 for _, cached in again for num in cached)
    metrics = httpx.get(f"{server.url}/metrics").text
    for name in ("cpu_hit_tokens_total", 'copied_bytes_total{direction="in"}'):
        (line,) = [one for one in metrics.splitlines() if one.startswith(f"pagedray_prefix_{name}")]
        assert float(line.split()[-1]) > 0
