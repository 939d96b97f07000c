"""The requests of benchmarks: random texts and token ids, or turns of ShareGPT."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
from tqdm import tqdm

from cluster.cli.bench.client import BenchRequest
from pagedray.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path

    import tokenizers

__all__ = [
    "WORKLOADS",
    "EngineRequest",
    "LocalTokenizer",
    "RandomLengths",
    "TextTokenizer",
    "Workload",
    "random_requests",
    "sharegpt_requests",
    "uniform_workload",
]

_LEAST_TOKENS = 4
_MOST_PROMPT_TOKENS = 1024
_MOST_TOKENS = 2048
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WORD_LENGTHS = (2, 9)
_MAX_ROUNDS = 12


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


class TextTokenizer(Protocol):
    """Counts the tokens of texts: a `LocalTokenizer`, or the server's client."""

    async def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with special tokens."""

    async def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens, without added special tokens."""


class LocalTokenizer:
    """The tokenizer of a folder or of a model on the Hub."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def from_folder(cls, folder: Path) -> LocalTokenizer:
        """Raises CheckpointError."""
        # The library takes a while to load, for --help too.
        from cluster.serving.text.tokenizer import read_tokenizer

        return cls(read_tokenizer(folder))

    async def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the special tokens that the tokenizer adds."""
        return self._tokenizer.encode(text).ids

    async def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


async def text_of_length(
    tokenizer: TextTokenizer, num_tokens: int, random_words: random.Random
) -> tuple[str, int]:
    """Return a text of random words, and its number of tokens with special tokens.

    That is `num_tokens`, or close to it if no cut of the text gives that many.
    """
    num_special = len(await tokenizer.encode(""))
    wanted = max(num_tokens - num_special, 1)
    # Rarely has a word less than one token.
    text = _words(random_words, wanted)
    best = text, 0
    for _ in range(_MAX_ROUNDS):
        token_ids = await tokenizer.encode(text)
        if abs(len(token_ids) - num_tokens) < abs(best[1] - num_tokens):
            best = text, len(token_ids)
        excess = len(token_ids) - num_tokens
        if excess == 0:
            break
        if excess < 0:
            text += " " + _words(random_words, -excess)
        elif excess > num_tokens:
            # The tail may be longer than the context, so that a server would not decode it.
            text = text[: len(text) * num_tokens // len(token_ids)].rstrip()
        else:
            text = await _cut(tokenizer, text, token_ids, excess)
    return best


async def _cut(tokenizer: TextTokenizer, text: str, token_ids: list[int], excess: int) -> str:
    """Return the text without as many tokens at its end."""
    tail = await tokenizer.decode(token_ids[-excess:])
    # Tokenizers differ in the whitespace and special tokens of decoded texts.
    return text[: max(1, len(text) - max(1, len(tail.strip())))].rstrip()


def _words(random_words: random.Random, number: int) -> str:
    return " ".join(
        "".join(random_words.choices(_LETTERS, k=random_words.randrange(*_WORD_LENGTHS)))
        for _ in range(number)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A prompt, and how many tokens to generate."""

    token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that are submitted at once."""

    num_requests: int
    draw_lengths: Callable[[random.Random], tuple[int, int]]
    """Returns the numbers of tokens of a prompt, and to generate."""
    num_prefixes: int = 1
    prefix_len: int = 0
    """Tokens of a prompt before the tokens of `draw_lengths`: one of `num_prefixes` prefixes."""

    def requests(self, vocab_size: int, seed: int) -> list[EngineRequest]:
        """Return the requests, equal for equal seeds."""
        lengths, tokens = random.Random(seed), random.Random(seed + 1)

        def token_ids(number: int) -> list[int]:
            return [tokens.randrange(vocab_size) for _ in range(number)]

        prefixes = [token_ids(self.prefix_len) for _ in range(self.num_prefixes)]
        requests = []
        for index in range(self.num_requests):
            num_prompt_tokens, max_tokens = self.draw_lengths(lengths)
            prompt = prefixes[index % self.num_prefixes] + token_ids(num_prompt_tokens)
            requests.append(EngineRequest(token_ids=prompt, max_tokens=max_tokens))
        return requests


def uniform_workload(
    num_requests: int, lengths: RandomLengths, *, num_prefixes: int = 1
) -> Workload:
    """Return requests of equal lengths, or of uniform lengths in a range."""
    return Workload(
        num_requests=num_requests,
        draw_lengths=lambda draws: (
            lengths.draw(lengths.input_len, draws),
            lengths.draw(lengths.output_len, draws),
        ),
        num_prefixes=num_prefixes,
        prefix_len=lengths.prefix_len,
    )


def _mixed_lengths(draws: random.Random) -> tuple[int, int]:
    return _lognormal(draws, 5.0, 1.1, 2048), _lognormal(draws, 5.2, 0.9, 1024)


def _lognormal(draws: random.Random, mean: float, deviation: float, most: int) -> int:
    """Return a length; `mean` and `deviation` describe its logarithm."""
    return min(max(round(draws.lognormvariate(mean, deviation)), _LEAST_TOKENS), most)


WORKLOADS = {
    "latency": uniform_workload(1, RandomLengths(input_len=128, output_len=256)),
    "decode": uniform_workload(256, RandomLengths(input_len=128, output_len=512)),
    "mixed": Workload(num_requests=1000, draw_lengths=_mixed_lengths),
    "prefill": uniform_workload(128, RandomLengths(input_len=4096, output_len=1)),
    "prefix": uniform_workload(
        512, RandomLengths(input_len=64, output_len=64, prefix_len=2048), num_prefixes=16
    ),
}
"""Workloads by their names for `--workload`; docs/load-tests.md describes them."""
