"""A rank with groups of layers: blocks behind windows are freed, and another sequence gets them.

A small controller plans steps at random: chunks, prefix hits, forks, swaps and recomputation. Each
free block is full of NaN. Tokens and their log-probabilities equal those of transformers.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from cluster.engine.engine_options import EngineOptions, engine_config
from pagedray.batch import (
    BlockCopy,
    Decodes,
    SequencePlan,
    SequenceStart,
    StepPlan,
    pack_token_ids,
)
from pagedray.config import StepLimits
from pagedray.sampling_params import SamplingParams
from tests.fakes import wait_for
from tests.greedy import LONGEST, NUM_TOKENS, Truth, truth_of
from tests.small_models.checkpoints import Case
from tests.small_models.family_cases import ALL_CASES
from workers.decoder_worker import DecoderWorker
from workers.parallel.group import SoloGroup

BLOCK_SIZE = 4
NUM_ROWS = 8
NUM_BLOCKS = 400
NUM_CPU_BLOCKS = 100
LIMITS = StepLimits(max_num_seqs=NUM_ROWS, max_num_batched_tokens=64)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0)
NO_BLOCK = -1
WINDOWED = [case for case in ALL_CASES if "sliding_window" in str(case.more)]
SAMPLED = {"gpt-oss-windows", "gemma3-two-ropes"}


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence, and its blocks while it has a row."""

    prompt: list[int]
    expected: list[int]
    expected_logprobs: list[float]
    token_ids: list[int] = field(init=False)
    row: int | None = None
    num_computed: int = 0
    entries: list[list[int]] = field(default_factory=list)
    """`[num_entries][num_groups]`."""
    swapped: list[list[int]] | None = None
    """The CPU block of each block, while it has no row."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt)

    @property
    def is_ended(self) -> bool:
        return len(self.token_ids) == len(self.prompt) + len(self.expected)


class Controller:
    """Plans the steps of one rank, and runs them."""

    def __init__(self, worker: DecoderWorker, rng: random.Random) -> None:
        self._worker = worker
        self._rng = rng
        self._windows = worker._spec.group_windows
        assert worker._runner is not None
        self._pool = worker._runner._cache.device_pool
        self._free = list(range(NUM_BLOCKS))
        self._free_cpu = list(range(NUM_CPU_BLOCKS))
        self._holders = Counter[int]()
        self._pool.fill_(float("nan"))
        self._step = 0
        self.events = Counter[str]()

    def run(self, sequences: list[Sequence]) -> None:
        """Run sequences to their ends, and check their tokens."""
        while waiting := [one for one in sequences if not one.is_ended]:
            self._run_step(waiting)
        assert len(self._free) == NUM_BLOCKS
        assert len(self._free_cpu) == NUM_CPU_BLOCKS

    def _run_step(self, sequences: list[Sequence]) -> None:
        rng = self._rng
        running = [one for one in sequences if one.row is not None]
        plan = StepPlan(self._step, [])
        self._step += 1
        if running and rng.random() < 0.15:
            self._preempt(rng.choice(running), plan)
        for one in running:
            self._free_dead(one)
        for one in sequences:
            can_fork = any(self._can_fork(other, one) for other in sequences)
            if one.row is None and (can_fork or rng.random() < 0.2):
                self._start(one, sequences, plan)
        planned = [one for one in sequences if one.row is not None and rng.random() < 0.8]
        chunks = [(one, self._chunk(one)) for one in planned]
        chunks.sort(key=lambda pair: pair[1].num_tokens == 1)
        decodes = [pair for pair in chunks if pair[1].num_tokens == 1 and pair[1].is_sampled]
        chunks = [pair for pair in chunks if pair not in decodes]
        growing = [chunk for _, chunk in decodes if chunk.new_block_ids]
        plan.chunks.extend(chunk for _, chunk in chunks)
        packed = Decodes.pack(
            [chunk.row for _, chunk in decodes],
            [chunk.first_position for _, chunk in decodes],
            [chunk.row for chunk in growing],
            [block for chunk in growing for block in chunk.new_block_ids],
        )
        plan = StepPlan(
            plan.step,
            plan.chunks,
            plan.starts,
            packed,
            swap_outs=plan.swap_outs,
            swap_ins=plan.swap_ins,
            copies=plan.copies,
        )
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
                self._release(one)

    def _chunk(self, one: Sequence) -> SequencePlan:
        """Compute some of the tokens of a sequence; generated tokens at most one by one."""
        num_left = len(one.token_ids) - one.num_computed
        num_tokens = self._rng.randint(1, min(num_left, 20))
        added = []
        while len(one.entries) * BLOCK_SIZE < one.num_computed + num_tokens:
            one.entries.append([self._allocate() for _ in self._windows])
            added += one.entries[-1]
        assert one.row is not None
        is_sampled = num_tokens == num_left
        return SequencePlan(one.row, one.num_computed, num_tokens, is_sampled, tuple(added))

    def _start(self, one: Sequence, sequences: list[Sequence], plan: StepPlan) -> None:
        used = {other.row for other in sequences}
        rows = [row for row in range(NUM_ROWS) if row not in used]
        # Blocks of a swapped sequence are in CPU blocks that another start may not take yet.
        if not rows:
            return
        one.row = self._rng.choice(rows)
        prompt_len, donor_row = len(one.prompt), -1
        sent = one.entries
        donors = [other for other in sequences if self._can_fork(other, one)]
        hits = [hit for other in sequences for hit in self._hits(other, one)]
        if one.swapped is not None:
            self.events["swap"] += 1
            self._swap_in(one, plan)
            sent = one.entries
        elif donors and self._rng.random() < 0.7:
            self.events["fork"] += 1
            donor = donors[0]
            assert donor.row is not None
            donor_row = donor.row
            one.num_computed = prompt_len - 1
            shared = (prompt_len - 1) // BLOCK_SIZE
            one.entries = self._share(donor, shared, prompt_len - 1)
            sent = [[self._allocate() for _ in self._windows]]
            one.entries += sent
            if (prompt_len - 1) % BLOCK_SIZE:
                plan.copies.extend(
                    BlockCopy(source, target)
                    for source, target in zip(donor.entries[shared], sent[0], strict=True)
                )
        elif hits and self._rng.random() < 0.7:
            self.events["hit"] += 1
            other, num_entries = max(hits, key=lambda hit: hit[1])
            one.num_computed = num_entries * BLOCK_SIZE
            sent = one.entries = self._share(other, num_entries, one.num_computed)
        token_ids = b"" if donor_row >= 0 else pack_token_ids(one.token_ids)
        block_ids = [block for entry in sent for block in entry]
        plan.starts.append(
            SequenceStart(
                one.row, token_ids, prompt_len, block_ids, GREEDY, 0, 0, donor_row=donor_row
            )
        )

    def _can_fork(self, donor: Sequence, one: Sequence) -> bool:
        """Return whether a sequence has all that a new one of the same prompt sees."""
        position = len(one.prompt) - 1
        is_alike = donor is not one and donor.prompt == one.prompt and donor.row is not None
        return (
            is_alike
            and len(one.token_ids) == len(one.prompt)
            and donor.num_computed > position
            and self._sees(donor, position // BLOCK_SIZE, position)
            and NO_BLOCK not in donor.entries[position // BLOCK_SIZE]
        )

    def _hits(self, other: Sequence, one: Sequence) -> Iterator[tuple[Sequence, int]]:
        """Yield how many entries of a running sequence a new one may begin with."""
        if other is one or other.row is None:
            return
        for num_entries in range(1, other.num_computed // BLOCK_SIZE + 1):
            position = num_entries * BLOCK_SIZE
            is_alike = one.token_ids[:position] == other.token_ids[:position]
            is_left = position < len(one.token_ids)
            if is_alike and is_left and self._sees(other, num_entries, position):
                yield other, num_entries

    def _sees(self, owner: Sequence, num_entries: int, position: int) -> bool:
        """Return whether a query finds all keys that it sees in the first entries."""
        return all(
            block != NO_BLOCK
            for index, entry in enumerate(owner.entries[:num_entries])
            for block, window in zip(entry, self._windows, strict=True)
            if not is_dead(index, position, window)
        )

    def _share(self, owner: Sequence, num_entries: int, position: int) -> list[list[int]]:
        shared = [
            [
                NO_BLOCK if is_dead(index, position, window) else block
                for block, window in zip(entry, self._windows, strict=True)
            ]
            for index, entry in enumerate(owner.entries[:num_entries])
        ]
        self._holders.update(block for entry in shared for block in entry if block != NO_BLOCK)
        return shared

    def _preempt(self, one: Sequence, plan: StepPlan) -> None:
        held = sum(block != NO_BLOCK for entry in one.entries for block in entry)
        if self._rng.random() < 0.5 and held <= len(self._free_cpu):
            one.swapped = []
            self._free_dead(one)
            for entry in one.entries:
                swapped = [NO_BLOCK if b == NO_BLOCK else self._free_cpu.pop() for b in entry]
                one.swapped.append(swapped)
                plan.swap_outs.extend(
                    BlockCopy(block, target)
                    for block, target in zip(entry, swapped, strict=True)
                    if block != NO_BLOCK
                )
            # The blocks are read until the step has ended.
            self._run_copies(plan)
        else:
            self.events["recompute"] += 1
            one.num_computed = 0
        self._release(one)

    def _run_copies(self, plan: StepPlan) -> None:
        pending = self._worker.launch(StepPlan(plan.step, [], swap_outs=plan.swap_outs))
        wait_for(lambda: pending.is_copied)
        plan.swap_outs.clear()

    def _swap_in(self, one: Sequence, plan: StepPlan) -> None:
        assert one.swapped is not None
        for swapped in one.swapped:
            entry = [NO_BLOCK if b == NO_BLOCK else self._allocate() for b in swapped]
            one.entries.append(entry)
            plan.swap_ins.extend(
                BlockCopy(source, block)
                for source, block in zip(swapped, entry, strict=True)
                if block != NO_BLOCK
            )
        one.swapped = None

    def _allocate(self) -> int:
        block = self._free.pop(self._rng.randrange(len(self._free)))
        self._holders[block] = 1
        return block

    def _release(self, one: Sequence) -> None:
        for entry in one.entries:
            for group in range(len(entry)):
                self._free_block(entry, group)
        one.entries, one.row = [], None

    def _free_dead(self, one: Sequence) -> None:
        """Free the blocks that no query from the next token on sees."""
        for index, entry in enumerate(one.entries):
            for group, window in enumerate(self._windows):
                if is_dead(index, one.num_computed, window) and entry[group] != NO_BLOCK:
                    self.events["freed"] += 1
                    self._free_block(entry, group)

    def _free_block(self, entry: list[int], group: int) -> None:
        block, entry[group] = entry[group], NO_BLOCK
        if block == NO_BLOCK:
            return
        self._holders[block] -= 1
        if not self._holders[block]:
            self._pool[block] = float("nan")
            self._free.append(block)


def is_dead(entry: int, position: int, window: int | None) -> bool:
    """Return whether no query at a position or later sees a token of an entry."""
    last_token = (entry + 1) * BLOCK_SIZE - 1
    return window is not None and position - last_token >= window


def make_worker(truth: Truth) -> DecoderWorker:
    options = EngineOptions(
        device="cpu",
        num_threads=1,
        num_blocks=NUM_BLOCKS,
        num_cpu_blocks=NUM_CPU_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=LONGEST,
    )
    worker = DecoderWorker(engine_config(truth.folder, options), SoloGroup())
    worker.load_weights(lambda done, total: None)
    worker.available_cache(LIMITS)
    worker.allocate_cache(NUM_BLOCKS, NUM_CPU_BLOCKS)
    return worker


PARAMS = [
    pytest.param(case, id=case.name, marks=[] if case.name in SAMPLED else pytest.mark.slow)
    for case in WINDOWED
]


@pytest.mark.parametrize("case", PARAMS)
def test_freed_blocks_of_windows_are_never_read(case: Case, tmp_path: Path) -> None:
    truth = truth_of(case, tmp_path)
    worker = make_worker(truth)
    assert any(window is not None for window in worker._spec.group_windows)
    events = Counter[str]()
    for seed in range(2):
        rng = random.Random(seed)
        controller = Controller(worker, rng)
        sequences = [
            Sequence(prompt, tokens, logprobs)
            for prompt, tokens, logprobs in zip(
                truth.prompts, truth.continuations, truth.logprobs, strict=True
            )
            for _ in range(2)
        ]
        with torch.inference_mode():
            controller.run(sequences)
        events += controller.events
    worker.close()
    assert set(events) >= {"freed", "fork", "hit", "swap", "recompute"}
