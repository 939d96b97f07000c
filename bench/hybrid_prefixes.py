"""Prefix hits of a hybrid model: shared prompts, conversations of ten turns, unlike prompts.

    python -m bench.hybrid_prefixes --shape qwen3.5-4b --output bench/results/hybrid_prefixes.json

Requests run one after another, each with a new question behind text that all share: as token ids
(raw), and as chats whose system message is shared. `hits` counts the requests that did not compute
the whole prompt. At last, prompts of 1 000 tokens that share nothing are sent at once, and generate
as many. Times to the first token are beside those of the same engine without a prefix cache, on the
same prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.engine import MAX_TOKEN_ID, SHAPES, save_model, write_results
from pagedray import AsyncLLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from pagedray import Generation

_TEMPLATE = (
    "{% set last = namespace(question=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.question = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.reasoning_content and loop.index0 > last.question %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n<think>\n{% endif %}"
)
"""Leaves out the reasoning of earlier turns, as Qwen's templates do."""
_UNLIKE = "unlike"
_UNLIKE_TOKENS = 1000
_WORDS = ("river", "stone", "light", "garden", "winter", "paper", "engine", "music", "cloud")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One load."""

    load: str
    num_requests: int
    mean_prompt: float
    """Tokens."""
    hits: int
    first_hit: int | None
    """The first request with a hit, counted from one."""
    num_short: int
    """Requests that reused fewer tokens than they share with the request before, less 63."""
    reused: float
    """Part of all prompt tokens that was not computed."""
    ttft_ms: float
    """Median."""
    uncached_ttft_ms: float
    """Median without a prefix cache."""


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--num-shared", type=int, default=1500, help="tokens (1500)")
    parser.add_argument("--num-own", type=int, default=700, help="tokens (700)")
    parser.add_argument("--num-conversations", type=int, default=4)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    loads = dict(_loads(options))
    measured = {}
    for has_cache in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder), SHAPES[options.shape])
            template = Path(folder) / "chat_template.jinja"
            template.write_text(_TEMPLATE)
            measured[has_cache] = asyncio.run(_measured(folder, loads, has_cache=has_cache))
    rows = [_row(load, measured[True][load], measured[False][load]) for load in loads]
    for row in rows:
        print(row, flush=True)
    if options.output:
        write_results(options.output, options.shape, rows=rows)


def _loads(options: argparse.Namespace) -> Iterator[tuple[str, list[Any]]]:  # Any: prompts
    choice = random.Random(1)

    def tokens(number: int) -> list[int]:
        return [choice.randrange(2, MAX_TOKEN_ID) for _ in range(number)]

    def text(number: int) -> str:
        return " ".join(choice.choices(_WORDS, k=max(1, number // 3)))

    shared, numbers = tokens(options.num_shared), range(options.num_requests)
    yield "raw", [shared + tokens(options.num_own) for _ in numbers]
    system = {"role": "system", "content": text(options.num_shared)}
    yield (
        "chat",
        [[system, {"role": "user", "content": text(options.num_own)}] for _ in numbers],
    )
    turns = []
    for _ in range(options.num_conversations):
        messages = [{"role": "system", "content": text(200)}]
        for _ in range(10):
            messages.append({"role": "user", "content": text(150)})
            turns.append([*messages])
            messages.append(
                {"role": "assistant", "content": text(200), "reasoning_content": text(100)}
            )
    yield "ten turns", turns
    yield _UNLIKE, [tokens(_UNLIKE_TOKENS) for _ in (*numbers, *numbers)]


@dataclass(frozen=True, slots=True)
class Answer:
    """One request that has ended."""

    prompt: list[int]
    num_cached_tokens: int
    seconds: float
    """Until the first token."""


# Any: prompts
async def _measured(
    folder: str, loads: dict[str, list[Any]], *, has_cache: bool
) -> dict[str, list[Answer]]:
    """Return the answer to each prompt of each load; unlike prompts run at once."""
    measured = {}
    async with AsyncLLM(
        folder,
        executor="local",
        load_format="dummy",
        max_model_len=8192,
        enable_prefix_cache=has_cache,
        show_progress=False,
    ) as llm:
        await _answer(llm, [7] * 300, 2)
        for load, prompts in loads.items():
            if load == _UNLIKE:
                # The first half warms up: other loads have no steps of as many tokens.
                for half in (prompts[: len(prompts) // 2], prompts[len(prompts) // 2 :]):
                    answers = (_answer(llm, prompt, _UNLIKE_TOKENS) for prompt in half)
                    measured[load] = await asyncio.gather(*answers)
            else:
                measured[load] = [await _answer(llm, prompt, 1) for prompt in prompts]
    return measured


async def _answer(llm: AsyncLLM, prompt: list[Any], max_tokens: int) -> Answer:  # Any: as above
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    start_s, seconds = time.perf_counter(), None
    results: AsyncIterator[Generation]
    if isinstance(prompt[0], dict):
        results = llm.chat(prompt, sampling)
    else:
        results = llm.generate(prompt, sampling)
    async for result in results:
        seconds = seconds or time.perf_counter() - start_s
        last = result
    assert seconds is not None
    return Answer(list(last.prompt_token_ids), last.num_cached_tokens, seconds)


def _row(load: str, cached: list[Answer], uncached: list[Answer]) -> Row:
    hits = [place for place, answer in enumerate(cached, 1) if answer.num_cached_tokens]
    total = sum(len(answer.prompt) for answer in cached)
    shared = [_num_shared(*pair) for pair in pairwise(answer.prompt for answer in cached)]
    return Row(
        load=load,
        num_requests=len(cached),
        mean_prompt=total / len(cached),
        hits=len(hits),
        first_hit=min(hits, default=None),
        num_short=sum(
            answer.num_cached_tokens < number - 63
            for answer, number in zip(cached[1:], shared, strict=True)
        ),
        reused=round(sum(answer.num_cached_tokens for answer in cached) / total, 4),
        ttft_ms=round(1e3 * statistics.median(answer.seconds for answer in cached), 2),
        uncached_ttft_ms=round(1e3 * statistics.median(answer.seconds for answer in uncached), 2),
    )


def _num_shared(first: list[int], second: list[int]) -> int:
    """Return how many tokens two prompts share at their beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), len(first))


if __name__ == "__main__":
    main()
