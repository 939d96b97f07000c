"""Acceptance lengths of a draft head, in float64, with shared noise and with rejection sampling.

    python -m tests.workers.draft_acceptance eagle3 --prompts 24 --tokens 128

Prints, for 1 to 5 drafts a step, the tokens that a step yields. The target continues prompts from
files that no training has seen.
"""

from __future__ import annotations

import argparse
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from scripts.train_tiny_llama import encode, is_held_out, library_files, read_documents
from tests.workers.draft_reference import (
    DraftReference,
    drafts_of,
    load_reference,
    states_and_logits,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
TARGET = EXAMPLES / "tiny-llama"
PROMPT_LENGTH = 48
MAX_DRAFTS = 5

Floats = NDArray[np.float64]


class Rule(ABC):
    """Draws drafts, and decides which of them a step accepts."""

    @abstractmethod
    def draft(self, logits: Tensor, position: int) -> int:
        """Return a draft of the token at a position."""

    @abstractmethod
    def accepted(self, drafts: list[int], logits: Tensor, position: int) -> list[int]:
        """Return the tokens of a step: accepted drafts, and one more.

        `logits` are the target's, `[num_drafts + 1, vocab_size]`, from `position` on.
        """


class SharedNoise(Rule):
    """Exact matching: the drafts and the target's tokens are drawn with the same Gumbel noise."""

    def __init__(self, temperature: float, seed: int) -> None:
        self._temperature = temperature
        self._seed = seed

    def draft(self, logits: Tensor, position: int) -> int:
        scores = logits.double().numpy()
        if self._temperature:
            noise = np.random.default_rng((self._seed, position)).gumbel(size=len(scores))
            scores = scores / self._temperature + noise
        return int(scores.argmax())

    def accepted(self, drafts: list[int], logits: Tensor, position: int) -> list[int]:
        tokens: list[int] = []
        for place, row in enumerate(logits):
            tokens.append(self.draft(row, position + place))
            if place == len(drafts) or drafts[place] != tokens[-1]:
                break
        return tokens


class Rejection(Rule):
    """Rejection sampling (arXiv 2211.17192, 2302.01318)."""

    def __init__(self, temperature: float, seed: int) -> None:
        self._temperature = temperature
        self._rng = np.random.default_rng(seed)
        self._drafted: list[Floats] = []

    def draft(self, logits: Tensor, position: int) -> int:
        del position
        self._drafted.append(probabilities(logits, self._temperature))
        return int(self._rng.choice(len(logits), p=self._drafted[-1]))

    def accepted(self, drafts: list[int], logits: Tensor, position: int) -> list[int]:
        del position
        drafted, self._drafted = self._drafted, []
        for place, (draft, q) in enumerate(zip(drafts, drafted, strict=True)):
            p = probabilities(logits[place], self._temperature)
            if self._rng.random() * q[draft] >= p[draft]:
                rest = np.maximum(p - q, 0.0)
                last = self._rng.choice(len(p), p=rest / rest.sum())
                return [*drafts[:place], int(last)]
        p = probabilities(logits[-1], self._temperature)
        return [*drafts, int(self._rng.choice(len(p), p=p))]


def probabilities(logits: Tensor, temperature: float) -> Floats:
    found: Floats = (logits.double() / temperature).softmax(-1).numpy()
    return found


def num_accepted(
    target: PreTrainedModel,
    head: DraftReference,
    rule: Rule,
    prompt: list[int],
    *,
    num_tokens: int,
    num_drafts: int,
) -> list[int]:
    """Return the number of tokens of each step of a sequence."""
    tokens = list(prompt)
    states, _ = states_and_logits(target, tokens[:-1])
    counts = []
    while len(tokens) < len(prompt) + num_tokens:
        number = len(tokens)
        known = [rows[: number - 1] for rows in states]
        drafts = drafts_of(head, known, tokens, num_drafts, rule.draft)
        states, logits = states_and_logits(target, [*tokens, *drafts])
        tokens += rule.accepted(drafts, logits[number - 1 :], number)
        counts.append(len(tokens) - number)
    return counts


def held_out_prompts(number: int) -> list[list[int]]:
    """Return the beginnings of documents from files that were held out."""
    rng = random.Random(3)
    files = [file for file in library_files() if is_held_out(file)]
    sources, prose = read_documents(files, rng)
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    chosen = rng.sample([*sources, *rng.sample(prose, len(sources))], number)
    return [encode(tokenizer, [text])[:PROMPT_LENGTH].tolist() for text in chosen]


def load_target() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    return model


def main() -> None:
    """Print a table of acceptance lengths."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("method", choices=["eagle3", "mtp"])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target()
    head = load_reference(EXAMPLES / f"tiny-llama-{arguments.method}", target)
    prompts = held_out_prompts(arguments.prompts)
    rules: list[tuple[str, Callable[[float, int], Rule], float]] = [("greedy", SharedNoise, 0.0)]
    rules += [(f"shared noise, T {t}", SharedNoise, t) for t in (0.7, 1.0)]
    rules += [(f"rejection, T {t}", Rejection, t) for t in (0.7, 1.0)]
    print(f"| | {' | '.join(f'K {number}' for number in range(1, MAX_DRAFTS + 1))} |")
    print("| --- |" + " --- |" * MAX_DRAFTS)
    for name, rule, temperature in rules:
        lengths = []
        for num_drafts in range(1, MAX_DRAFTS + 1):
            counts = [
                count
                for seed, prompt in enumerate(prompts)
                for count in num_accepted(
                    target,
                    head,
                    rule(temperature, seed),
                    prompt,
                    num_tokens=arguments.tokens,
                    num_drafts=num_drafts,
                )
            ]
            lengths.append(f"{np.mean(counts):.2f}")
        print(f"| {name} | {' | '.join(lengths)} |", flush=True)


if __name__ == "__main__":
    main()
