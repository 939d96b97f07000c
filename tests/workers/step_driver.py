"""Steps of one rank that a test plans at random, with tokens that transformers has generated."""

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
import pytest
import torch

from cluster.engine.engine_options import EngineOptions, engine_config
from pagedray.batch import Decodes, SequencePlan, StepPlan
from pagedray.config import StepLimits
from pagedray.sampling_params import SamplingParams
from tests.fakes import wait_for
from tests.greedy import LONGEST, NUM_TOKENS, Truth
from tests.small_models.checkpoints import Case
from workers.decoder_worker import DecoderWorker
from workers.parallel.group import SoloGroup

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0)


@dataclass(slots=True, eq=False)
class DrivenSequence:
    """A sequence, and the tokens and log-probabilities that follow its prompt."""

    prompt: list[int]
    expected: list[int]
    expected_logprobs: list[float]
    token_ids: list[int] = field(init=False)
    row: int | None = None
    num_computed: int = 0

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt)

    @property
    def is_ended(self) -> bool:
        return len(self.token_ids) == len(self.prompt) + len(self.expected)


S = TypeVar("S", bound=DrivenSequence)


class StepDriver(ABC, Generic[S]):
    """Plans the steps of one rank, runs them, and checks each token."""

    num_rows: int
    num_blocks: int
    num_cpu_blocks: int

    def __init__(self, worker: DecoderWorker, rng: random.Random) -> None:
        assert worker._runner is not None
        self._worker = worker
        self._rng = rng
        self._cache = worker._runner._cache
        self._free = list(range(self.num_blocks))
        self._free_cpu = list(range(self.num_cpu_blocks))
        self._step = 0
        self.events = Counter[str]()

    @classmethod
    def run_all(cls, truth: Truth, make: type[S], wanted: Set[str] = frozenset()) -> Counter[str]:
        """Run the sequences of a checkpoint twice at random, and return the events.

        At most eight further runs follow until there are the wanted events.
        """
        worker = cls._make_worker(truth)
        events = Counter[str]()
        for seed in range(10):
            if seed >= 2 and events.keys() >= wanted:
                break
            driver = cls(worker, random.Random(seed))
            sequences = [
                make(*parts)
                for parts in zip(truth.prompts, truth.continuations, truth.logprobs, strict=True)
                for _ in range(2)
            ]
            with torch.inference_mode():
                driver._run(sequences)
            events += driver.events
        worker.close()
        return events

    @classmethod
    def _make_worker(cls, truth: Truth) -> DecoderWorker:
        options = EngineOptions(
            device="cpu",
            num_threads=1,
            num_blocks=cls.num_blocks,
            num_cpu_blocks=cls.num_cpu_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=LONGEST,
        )
        worker = DecoderWorker(engine_config(truth.folder, options), SoloGroup())
        worker.load_weights(lambda done, total: None)
        worker.available_cache(StepLimits(max_num_seqs=cls.num_rows, max_num_batched_tokens=64))
        worker.allocate_cache(cls.num_blocks, cls.num_cpu_blocks)
        return worker

    def _run(self, sequences: list[S]) -> None:
        """Run sequences to their ends."""
        while waiting := [one for one in sequences if not one.is_ended]:
            self._run_step(waiting, StepPlan(self._step, []))
            self._step += 1
        self._free_rest()
        assert len(self._free) == self.num_blocks
        assert len(self._free_cpu) == self.num_cpu_blocks

    @abstractmethod
    def _run_step(self, sequences: list[S], plan: StepPlan) -> None:
        """Plan and launch a step of some of the sequences."""

    @abstractmethod
    def _end(self, one: S) -> None:
        """Free the row and the blocks of a sequence."""

    def _free_rest(self) -> None:
        """Free the blocks that no sequence has."""

    def _free_rows(self, sequences: list[S]) -> list[int]:
        used = {one.row for one in sequences}
        return [row for row in range(self.num_rows) if row not in used]

    def _launch(self, plan: StepPlan, pairs: Sequence[tuple[S, SequencePlan]] = ()) -> None:
        """Run the step of a plan with the work of some sequences, and check sampled tokens."""
        pairs = sorted(pairs, key=lambda pair: pair[1].num_tokens == 1)
        decodes = [pair for pair in pairs if pair[1].num_tokens == 1 and pair[1].is_sampled]
        chunks = [pair for pair in pairs if pair not in decodes]
        growing = [chunk for _, chunk in decodes if chunk.new_block_ids]
        packed = Decodes.pack(
            [chunk.row for _, chunk in decodes],
            [chunk.first_position for _, chunk in decodes],
            [chunk.row for chunk in growing],
            [block for chunk in growing for block in chunk.new_block_ids],
        )
        plan = msgspec.structs.replace(plan, chunks=[chunk for _, chunk in chunks], decodes=packed)
        pending = self._worker.launch(plan)
        output = pending.output()
        wait_for(lambda: pending.is_copied)
        self._free_cpu += [copy.source for copy in plan.swap_ins]
        sampled = iter(zip(output.token_ids, output.logprobs, strict=True))
        for one, chunk in chunks + decodes:
            one.num_computed += chunk.num_tokens
            if not chunk.is_sampled:
                continue
            token_id, logprobs = next(sampled)
            assert logprobs is not None
            place = len(one.token_ids) - len(one.prompt)
            assert token_id == one.expected[place]
            assert logprobs.chosen == pytest.approx(one.expected_logprobs[place], rel=0, abs=1e-4)
            one.token_ids.append(token_id)
            if one.is_ended:
                self._end(one)


def params_of_cases(cases: Sequence[Case], sampled: set[str]) -> list[Any]:  # Any: pytest's
    """Return cases as parameters; cases that are not named run with slow tests."""
    return [
        pytest.param(case, id=case.name, marks=[] if case.name in sampled else pytest.mark.slow)
        for case in cases
    ]
