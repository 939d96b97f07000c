"""Speculation with drafts that are right as often as wanted, beside decoding without drafts.

    python -m bench.speculation --shape llama-8b --output bench/results/speculation.json

Weights are random, but for the head: the likeliest token follows the last token by number, so a
drafter can know it. Each draft is right with the probability `--acceptance`, if all before it are.
`fixed` verifies as many drafts as `--num-drafts` says in each step, and `adaptive` as many as the
engine buys. The milliseconds are those of a token of each request, the best of the rounds.

With `--head`, a draft head of EAGLE-3 guesses in each step. It computes with random weights, but
its logits count on from the token that it reads, with errors behind random tokens. For 3.0 tokens
of a chain of 4 drafts, `--acceptance` is 0.741. `fed` has no drafts, but the head reads all tokens;
compare with `plain` of a run without `--head`. With `--draft-model`, a model of the size of
Qwen3-0.6B does the same.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from bench.engine import MAX_TOKEN_ID, SHAPES, save_model, write_results
from cluster.engine.local_executor import LocalExecutor
from cluster.scheduling.draft_estimates import RowTimes
from cluster.scheduling.speculation import Speculator
from pagedray import LLM, SamplingParams
from pagedray.config import SpeculationConfig
from workers.layers.linear_choice import linear_kernel_class
from workers.models.draft_head import DraftOutputs, Eagle3Head
from workers.models.draft_model import DraftModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.scheduling.sequence import Sequence
    from pagedray.config import SpeculationMethod
    from workers.models.self_attention import StepAttention

_DRAFT_MODEL = {
    **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "num_attention_heads": 16,
}
"""The sizes in which a draft model differs from its target."""
_NUM_PROMPT_TOKENS = 64
_NUM_NEW_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to draft at one load."""

    num_requests: int
    acceptance: float
    """How likely a draft is right."""
    num_drafts: int
    """Of a sequence in a step; the most of them if they are adaptive."""
    mode: str
    """plain, fed, fixed or adaptive."""
    ms_per_token: float
    mean_length: float
    """Tokens of a chain, its drafts that were right and the token behind them; 1 without chains."""


class CountingDrafter:
    """Counts on from the last token; each draft is wrong by chance."""

    def __init__(self, *, acceptance: float, vocab_size: int) -> None:
        self._rng = random.Random(5)
        self._acceptance = acceptance
        self._vocab_size = vocab_size

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        drafts, token_id = [], sequence.token_ids[-1]
        for _ in range(limit):
            is_right = self._rng.random() < self._acceptance
            token_id = (token_id + (1 if is_right else 2)) % self._vocab_size
            drafts.append(token_id)
        return drafts


class FreeDrafts(RowTimes):
    """Steps of any number of rows take the same time, without gaps, so every draft is worth it."""

    gap_s = 0.0
    head_s = 0.0

    def time_of(self, num_rows: int, *, is_alone: bool = False) -> float:
        return 1.0

    def has_run_ahead(self, num_rows: int) -> bool:
        return True


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[1.0, 0.8])
    parser.add_argument("--num-drafts", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--head", action="store_true")
    parser.add_argument("--draft-model", action="store_true")
    parser.add_argument("--draft-vocab-size", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), SHAPES[options.shape])
        source = {"method": "ngram"}
        if options.head:
            source = {"model": _save_head(Path(folder) / "head", options)}
            _pass_tokens_on()
        elif options.draft_model:
            draft_model = Path(folder) / "draft"
            draft_model.mkdir()
            save_model(draft_model, SHAPES[options.shape] | _DRAFT_MODEL)
            source = {"method": "draft_model", "model": str(draft_model)}
        with LLM(
            folder,
            executor="local",
            load_format="dummy",
            max_model_len=2048,
            speculative_config={**source, "num_speculative_tokens": max(options.num_drafts)},
            show_progress=False,
        ) as llm:
            _let_count(llm)
            for num_requests in options.requests:
                for row in _rows(llm, num_requests, options):
                    print(row, flush=True)
                    rows.append(row)
    if options.output:
        write_results(options.output, options.shape, rows=rows)


def _save_head(folder: Path, options: argparse.Namespace) -> str:
    """Write the configuration of a draft head, without weights; return its folder."""
    folder.mkdir()
    last = SHAPES[options.shape]["num_hidden_layers"] - 1
    tapped = [min(2, last), last // 2, max(last - 2, 0)]
    shape = SHAPES[options.shape] | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": options.draft_vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": tapped},
    }
    (folder / "config.json").write_text(json.dumps(shape))
    return str(folder)


def _let_count(llm: LLM) -> None:
    """Give the head weights with which the model counts."""
    executor = llm._engine._executor
    assert isinstance(executor, LocalExecutor)
    assert executor._decoder is not None
    model = executor._decoder._model
    assert model is not None
    assert model._head is not None
    if isinstance(executor._decoder._drafter, DraftModel):
        executor._decoder._drafter._decoder._embedding.weight.mul_(1000.0)
    # Layers add little to a large embedding.
    weight = model._embedding.weight.mul_(1000.0)
    kernel = linear_kernel_class(weight.dtype, weight.device)(weight.roll(1, 0), None)
    kernel.finalize()
    model._head._kernel = kernel


def _pass_tokens_on() -> None:
    """Have draft heads return the embeddings of their tokens, from which logits can count on."""
    run = Eagle3Head.run

    def pass_on(
        self: Eagle3Head,
        token_ids: torch.Tensor,
        states: torch.Tensor | None,
        positions: torch.Tensor,
        attention: StepAttention,
    ) -> DraftOutputs:
        outputs = run(self, token_ids, states, positions, attention)
        return DraftOutputs(self._embedding(token_ids), outputs.states)

    Eagle3Head.run = pass_on  # type: ignore[method-assign, assignment]


def _let_head_count(llm: LLM, acceptance: float) -> None:
    """Give a drafter logits that count on, and are wrong behind random tokens."""
    executor = llm._engine._executor
    assert isinstance(executor, LocalExecutor)
    assert executor._decoder is not None
    drafter = executor._decoder._drafter
    assert isinstance(drafter, DraftModel | Eagle3Head)
    if isinstance(drafter, DraftModel):
        logits, embedding = drafter._decoder._head, drafter._decoder._embedding
    else:
        logits, embedding = drafter._logits, drafter._embedding
    assert logits is not None
    kernel, size = logits._kernel, len(drafter.token_ids)
    sources = np.roll(np.arange(size), 1)
    is_wrong = np.random.default_rng(7).random(size) > acceptance
    sources[is_wrong] = np.roll(sources[is_wrong], 1)
    weight = embedding.weight[torch.from_numpy(sources)]
    if weight.is_cuda:
        # Graphs read it.
        kernel.weight.copy_(weight)
    else:
        logits._kernel = linear_kernel_class(weight.dtype, weight.device)(weight, None)
        logits._kernel.finalize()


def _rows(llm: LLM, num_requests: int, options: argparse.Namespace) -> Iterator[Row]:
    has_drafter = options.head or options.draft_model
    for acceptance in options.acceptance:
        modes = [("fixed", number) for number in options.num_drafts]
        modes.append(("adaptive", max(options.num_drafts)))
        if has_drafter:
            _let_head_count(llm, acceptance)
        if acceptance == options.acceptance[0]:
            modes.insert(0, ("fed" if has_drafter else "plain", 0))
        for mode, num_drafts in modes:
            speculator = None
            if num_drafts:
                speculator = _speculator(acceptance, num_drafts, mode, has_head=has_drafter)
            scheduler = llm._engine._scheduler
            scheduler._speculator = scheduler._planner._speculator = speculator
            scheduler._outputs._speculator = speculator
            # The first call compiles kernels, and measures steps.
            times = [_seconds(llm, num_requests, seed) for seed in range(1 + options.rounds)]
            length = 1.0
            if speculator is not None and speculator.num_chains:
                length += speculator.stats().num_accepted_tokens / speculator.num_chains
            yield Row(
                num_requests=num_requests,
                acceptance=acceptance,
                num_drafts=num_drafts,
                mode=mode,
                ms_per_token=round(1e3 * min(times[1:]) / _NUM_NEW_TOKENS, 4),
                mean_length=round(length, 3),
            )


def _speculator(acceptance: float, num_drafts: int, mode: str, *, has_head: bool) -> Speculator:
    """Return a speculator that has measured nothing yet."""
    method: SpeculationMethod = "eagle3" if has_head else "ngram"
    config = SpeculationConfig(method=method, num_speculative_tokens=num_drafts)
    known = None
    if not has_head:
        known = CountingDrafter(acceptance=acceptance, vocab_size=MAX_TOKEN_ID)
    speculator = Speculator(config, known)
    if mode == "fixed":
        speculator.times = FreeDrafts()
    return speculator


def _seconds(llm: LLM, num_requests: int, seed: int) -> float:
    rng = random.Random(f"{num_requests} {seed}")
    prompts = [
        [rng.randrange(2, MAX_TOKEN_ID // 2) for _ in range(_NUM_PROMPT_TOKENS)]
        for _ in range(num_requests)
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=_NUM_NEW_TOKENS, ignore_eos=True)
    started_s = time.perf_counter()
    generations = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started_s
    for prompt, generation in zip(prompts, generations, strict=True):
        expected = range(prompt[-1] + 1, prompt[-1] + 1 + _NUM_NEW_TOKENS)
        assert list(generation.outputs[0].token_ids) == list(expected)
    return seconds


if __name__ == "__main__":
    main()
