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

from pagedray.batch import BlockCopy, SequencePlan, SequenceStart, StepPlan, pack_token_ids
from tests.greedy import truth_of
from tests.small_models.checkpoints import Case
from tests.small_models.family_cases import ALL_CASES
from tests.workers.step_driver import (
    BLOCK_SIZE,
    GREEDY,
    DrivenSequence,
    StepDriver,
    params_of_cases,
)
from workers.decoder_worker import DecoderWorker

NO_BLOCK = -1
WINDOWED = [case for case in ALL_CASES if "sliding_window" in str(case.more)]


@dataclass(slots=True, eq=False)
class Sequence(DrivenSequence):
    """A sequence, and its blocks while it has a row."""

    entries: list[list[int]] = field(default_factory=list)
    """`[num_entries][num_groups]`."""
    swapped: list[list[int]] | None = None
    """The CPU block of each block, while it has no row."""


class Controller(StepDriver[Sequence]):
    """Plans chunks, forks, prefix hits, and preemption by swap or recomputation."""

    num_rows = 8
    num_blocks = 400
    num_cpu_blocks = 100

    def __init__(self, worker: DecoderWorker, rng: random.Random) -> None:
        super().__init__(worker, rng)
        self._windows = worker._spec.group_windows
        assert any(window is not None for window in self._windows)
        self._pool = self._cache.device_pool
        self._holders = Counter[int]()
        self._pool.fill_(float("nan"))

    def _run_step(self, sequences: list[Sequence], plan: StepPlan) -> None:
        rng = self._rng
        running = [one for one in sequences if one.row is not None]
        if running and rng.random() < 0.15:
            self._preempt(rng.choice(running), plan)
        for one in running:
            self._free_dead(one)
        for one in sequences:
            can_fork = any(self._can_fork(other, one) for other in sequences)
            if one.row is None and (can_fork or rng.random() < 0.2):
                self._start(one, sequences, plan)
        planned = [one for one in sequences if one.row is not None and rng.random() < 0.8]
        self._launch(plan, [(one, self._chunk(one)) for one in planned])

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
        rows = self._free_rows(sequences)
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
            self._launch(StepPlan(plan.step, [], swap_outs=plan.swap_outs))
            plan.swap_outs.clear()
        else:
            self.events["recompute"] += 1
            one.num_computed = 0
        self._end(one)

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

    def _end(self, one: Sequence) -> None:
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


@pytest.mark.parametrize("case", params_of_cases(WINDOWED, {"gpt-oss-windows"}))
def test_freed_blocks_of_windows_are_never_read(case: Case, tmp_path: Path) -> None:
    wanted = {"freed", "fork", "hit", "swap", "recompute"}
    events = Controller.run_all(truth_of(case, tmp_path), Sequence, wanted)
    assert events.keys() >= wanted
