"""The requests of a load test: random texts, or the first turns of ShareGPT conversations."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from tqdm import tqdm

from cluster.cli.bench.client import BenchRequest
from cluster.cli.bench.text_lengths import text_of_length
from pagedray.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path

    from cluster.cli.bench.text_lengths import TextTokenizer

__all__ = ["RandomLengths", "random_requests", "sharegpt_requests"]

_LEAST_TOKENS = 4
_MOST_PROMPT_TOKENS = 1024
_MOST_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLengths:
    """Lengths of random requests, in tokens."""

    input_len: int
    output_len: int
    prefix_len: int = 0
    """Tokens at the start that all prompts share, in addition to `input_len`."""
    range_ratio: float = 0.0
    """Lengths are uniform in [length * (1 - ratio), length * (1 + ratio)]."""

    def draw(self, length: int, draws: random.Random) -> int:
        low, high = length * (1.0 - self.range_ratio), length * (1.0 + self.range_ratio)
        return max(1, draws.randint(int(low), int(high)))


async def random_requests(
    tokenizer: TextTokenizer,
    number: int,
    lengths: RandomLengths,
    seed: int,
    *,
    has_bar: bool | None,
) -> list[BenchRequest]:
    """Return requests of random words, equal for equal seeds; `has_bar` is as in `send_load`."""
    draws = random.Random(seed)
    prefix = ""
    num_prefix = 0
    if lengths.prefix_len:
        prefix, num_prefix = await text_of_length(tokenizer, lengths.prefix_len, draws)
        prefix += " "
    requests = []
    # The server may be far away, and asked twice for each prompt.
    disabled = None if has_bar is None else not has_bar
    for _ in tqdm(range(number), unit="prompt", leave=False, disable=disabled):
        length = lengths.draw(lengths.input_len, draws)
        text, num_tokens = await text_of_length(tokenizer, length, draws)
        requests.append(
            BenchRequest(
                prompt=prefix + text,
                num_prompt_tokens=num_prefix + num_tokens,
                max_tokens=lengths.draw(lengths.output_len, draws),
            )
        )
    return requests


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


async def sharegpt_requests(
    tokenizer: TextTokenizer, number: int, path: Path, output_len: int | None, seed: int
) -> list[BenchRequest]:
    """Return the first turns of conversations, with the lengths of their answers to generate.

    Very short and very long conversations are left out, and the rest is repeated if there are too
    few. Raises StartupError.
    """
    try:
        conversations = msgspec.json.decode(path.read_bytes(), type=list[_Conversation])
    except OSError as error:
        raise StartupError(f"Cannot read --dataset-path {path}: {error.strerror}.") from error
    except msgspec.MsgspecError as error:
        raise StartupError(f"--dataset-path {path} is not a ShareGPT file: {error}.") from error
    random.Random(seed).shuffle(conversations)
    requests: list[BenchRequest] = []
    for turns in (one.conversations for one in conversations if len(one.conversations) > 1):
        if len(requests) == number:
            break
        num_prompt = len(await tokenizer.encode(turns[0].value))
        num_output = output_len or len(await tokenizer.encode(turns[1].value))
        if (
            min(num_prompt, num_output) >= _LEAST_TOKENS
            and num_prompt <= _MOST_PROMPT_TOKENS
            and num_prompt + num_output <= _MOST_TOKENS
        ):
            requests.append(
                BenchRequest(
                    prompt=turns[0].value, num_prompt_tokens=num_prompt, max_tokens=num_output
                )
            )
    if not requests:
        raise StartupError(
            f"--dataset-path {path} has no conversation of {_LEAST_TOKENS} to "
            f"{_MOST_TOKENS} tokens."
        )
    return [requests[index % len(requests)] for index in range(number)]
