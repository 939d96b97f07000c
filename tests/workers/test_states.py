"""A rank with recurrent layers: states are cleared, saved, loaded and swapped.

A small controller plans steps at random: chunks, snapshots before, within and after chunks, hits of
snapshots, swaps and recomputation, in rows that other sequences have used. Free blocks and the
states of free rows are full of NaN. Tokens and their log-probabilities equal those of transformers.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from attention.kernels.arguments import CHUNK_SIZE
from pagedray.batch import (
    BlockCopy,
    SequencePlan,
    SequenceStart,
    StateSave,
    StepPlan,
    pack_token_ids,
)
from tests.greedy import truth_of
from tests.small_models.checkpoints import Case
from tests.small_models.family_cases import HYBRID_CASES
from tests.workers.step_driver import (
    BLOCK_SIZE,
    GREEDY,
    DrivenSequence,
    StepDriver,
    params_of_cases,
)
from workers.decoder_worker import DecoderWorker


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state of a sequence after some tokens, and copies of its blocks."""

    token_ids: list[int]
    blocks: list[int]
    state: list[int]


@dataclass(slots=True, eq=False)
class Sequence(DrivenSequence):
    """A sequence, and its blocks while it has a row."""

    blocks: list[int] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)
    """The blocks of the state to load before its next tokens."""
    swapped: tuple[list[int], list[int]] | None = None
    """The CPU blocks of its tokens and of its state, while it has no row."""


class Controller(StepDriver[Sequence]):
    """Plans chunks, snapshots, and preemption by swap or recomputation."""

    num_rows = 6
    num_blocks = 1000
    num_cpu_blocks = 400

    def __init__(self, worker: DecoderWorker, rng: random.Random) -> None:
        super().__init__(worker, rng)
        self._state_size = worker._spec.state_blocks
        self._snapshots: list[Snapshot] = []
        self._cache._device_blocks.fill_(float("nan"))

    def _free_rest(self) -> None:
        for snapshot in self._snapshots:
            self._release(snapshot.blocks + snapshot.state)

    def _run_step(self, sequences: list[Sequence], plan: StepPlan) -> None:
        rng = self._rng
        running = [one for one in sequences if one.row is not None]
        if running and rng.random() < 0.2:
            self._preempt(rng.choice(running), plan)
        for one in sequences:
            if one.row is None and rng.random() < 0.3:
                self._start(one, sequences, plan)
        planned = [one for one in sequences if one.row is not None and rng.random() < 0.8]
        saved = self._save(planned, plan)
        for one in planned:
            plan.copies.extend(self._copies(one.loaded, self._live(one)))
        pairs = [(one, self._chunk(one)) for one in planned]
        for one, chunk in pairs:
            saved += self._save_late(one, chunk, plan)
        self._launch(plan, pairs)
        self._snapshots += saved
        for one in planned:
            self._release(one.loaded)
            one.loaded = []

    def _chunk(self, one: Sequence) -> SequencePlan:
        num_left = len(one.token_ids) - one.num_computed
        num_tokens = min(self._rng.randint(1, 2 * num_left), num_left)
        added = self._grow(one, one.num_computed + num_tokens)
        assert one.row is not None
        is_sampled = num_tokens == num_left
        return SequencePlan(one.row, one.num_computed, num_tokens, is_sampled, tuple(added))

    def _start(self, one: Sequence, sequences: list[Sequence], plan: StepPlan) -> None:
        rows = self._free_rows(sequences)
        if not rows:
            return
        one.row = self._rng.choice(rows)
        one.num_computed = 0
        hits = [
            snapshot
            for snapshot in self._snapshots
            if len(snapshot.token_ids) < len(one.token_ids)
            and one.token_ids[: len(snapshot.token_ids)] == snapshot.token_ids
        ]
        if one.swapped is not None:
            self.events["swap"] += 1
            one.num_computed = len(one.token_ids) - 1
            blocks, state = one.swapped
            one.blocks, one.loaded = self._take(len(blocks)), self._take(len(state))
            plan.swap_ins.extend(self._copies(blocks + state, one.blocks + one.loaded))
            one.swapped = None
            # They arrive while the next steps run.
            self._launch(StepPlan(plan.step, [], swap_ins=plan.swap_ins))
            plan.swap_ins.clear()
        elif hits and self._rng.random() < 0.7:
            self.events["hit"] += 1
            hit = self._rng.choice(hits)
            one.num_computed = len(hit.token_ids)
            one.blocks, one.loaded = self._take(len(hit.blocks)), self._take(self._state_size)
            # Here copies stand for the blocks that sequences share.
            plan.copies.extend(self._copies(hit.blocks + hit.state, one.blocks + one.loaded))
            self._launch(StepPlan(plan.step, [], copies=plan.copies))
            plan.copies.clear()
        token_ids, blocks = pack_token_ids(one.token_ids), list(one.blocks)
        plan.starts.append(SequenceStart(one.row, token_ids, len(one.prompt), blocks, GREEDY, 0, 0))

    def _save(self, planned: list[Sequence], plan: StepPlan) -> list[Snapshot]:
        """Copy the states and the blocks of some sequences before they compute more tokens."""
        saved = []
        for one in planned:
            if one.loaded or not one.num_computed or self._rng.random() > 0.3:
                continue
            self.events["save"] += 1
            snapshot = Snapshot(
                one.token_ids[: one.num_computed],
                self._take(len(one.blocks)),
                self._take(self._state_size),
            )
            plan.copies.extend(self._copies(self._live(one), snapshot.state))
            plan.copies.extend(self._copies(one.blocks, snapshot.blocks))
            saved.append(snapshot)
        return saved

    def _save_late(self, one: Sequence, chunk: SequencePlan, plan: StepPlan) -> list[Snapshot]:
        """Copy the state and the blocks of a sequence after a chunk, and of a place within it."""
        end, saved = chunk.first_position + chunk.num_tokens, []
        for position in (chunk.first_position + CHUNK_SIZE, end):
            if position > end or (position == end and self._rng.random() > 0.5):
                continue
            state = self._live(one)
            if position < end:
                self.events["save within a chunk"] += 1
                state = self._state_blocks(self.num_rows + len(plan.saves))
                plan.saves.append(StateSave(chunk.row, position))
            num_blocks = -(-position // BLOCK_SIZE)
            snapshot = Snapshot(
                one.token_ids[:position], self._take(num_blocks), self._take(self._state_size)
            )
            plan.late_copies.extend(self._copies(state, snapshot.state))
            plan.late_copies.extend(self._copies(one.blocks[:num_blocks], snapshot.blocks))
            saved.append(snapshot)
        return saved

    def _preempt(self, one: Sequence, plan: StepPlan) -> None:
        needed = len(one.blocks) + self._state_size
        # As for a decode, all tokens but the last are computed.
        is_whole = one.num_computed == len(one.token_ids) - 1 and not one.loaded
        if is_whole and self._rng.random() < 0.7 and needed <= len(self._free_cpu):
            targets = [self._free_cpu.pop() for _ in range(needed)]
            plan.evictions.extend(self._copies(one.blocks + self._live(one), targets))
            one.swapped = targets[: len(one.blocks)], targets[len(one.blocks) :]
            # A sequence that starts in this plan may take the row, but not these blocks.
            blocks, one.blocks, one.row = one.blocks, [], None
            self._launch(StepPlan(plan.step, [], evictions=plan.evictions))
            plan.evictions.clear()
            self._release(blocks)
            return
        self.events["recompute"] += 1
        self._end(one)

    def _live(self, one: Sequence) -> list[int]:
        assert one.row is not None
        return self._state_blocks(one.row)

    def _state_blocks(self, index: int) -> list[int]:
        first = self.num_blocks + index * self._state_size
        return list(range(first, first + self._state_size))

    @staticmethod
    def _copies(sources: list[int], targets: list[int]) -> list[BlockCopy]:
        pairs = zip(sources, targets, strict=False)
        return [BlockCopy(source, target) for source, target in pairs]

    def _grow(self, one: Sequence, num_tokens: int) -> list[int]:
        added = self._take(max(0, -(-num_tokens // BLOCK_SIZE) - len(one.blocks)))
        one.blocks += added
        return added

    def _take(self, num_blocks: int) -> list[int]:
        while len(self._free) < num_blocks:
            snapshot = self._snapshots.pop(0)
            self._release(snapshot.blocks + snapshot.state)
        self._rng.shuffle(self._free)
        taken, self._free = self._free[:num_blocks], self._free[num_blocks:]
        return taken

    def _end(self, one: Sequence) -> None:
        self._release(one.blocks + one.loaded)
        for block in self._live(one):
            self._cache._device_blocks[block] = float("nan")
        one.blocks, one.loaded, one.row = [], [], None

    def _release(self, blocks: list[int]) -> None:
        for block in blocks:
            self._cache._device_blocks[block] = float("nan")
        self._free += blocks


@pytest.mark.parametrize("case", params_of_cases(HYBRID_CASES, {"qwen3_5-delta-rules"}))
def test_states_follow_their_sequences(case: Case, tmp_path: Path) -> None:
    events = Controller.run_all(truth_of(case, tmp_path), Sequence)
    assert set(events) == {"save", "save within a chunk", "hit", "swap", "recompute"}
