"""A rank with recurrent layers: states are cleared, saved, loaded and swapped.

A small controller plans steps at random: chunks, snapshots, hits of snapshots, swaps and
recomputation, in rows that other sequences have used. Free blocks and the states of free rows are
full of NaN. Tokens and their log-probabilities equal those of transformers.
"""

import random
from collections import Counter
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
from tests.small_models.family_cases import HYBRID_CASES
from workers.decoder_worker import DecoderWorker
from workers.parallel.group import SoloGroup

BLOCK_SIZE = 4
NUM_ROWS = 6
NUM_BLOCKS = 1000
NUM_CPU_BLOCKS = 400
LIMITS = StepLimits(max_num_seqs=NUM_ROWS, max_num_batched_tokens=64)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0)
SAMPLED = {"lfm2-moe", "qwen3_5-delta-rules"}


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state of a sequence after some tokens, and copies of its blocks."""

    token_ids: list[int]
    blocks: list[int]
    state: list[int]


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence, and its blocks while it has a row."""

    prompt: list[int]
    expected: list[int]
    expected_logprobs: list[float]
    token_ids: list[int] = field(init=False)
    row: int | None = None
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)
    """The blocks of the state to load before its next tokens."""
    swapped: tuple[list[int], list[int]] | None = None
    """The CPU blocks of its tokens and of its state, while it has no row."""

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
        assert worker._runner is not None
        self._cache = worker._runner._cache
        self._state_size = worker._spec.state_blocks
        self._free = list(range(NUM_BLOCKS))
        self._free_cpu = list(range(NUM_CPU_BLOCKS))
        self._snapshots: list[Snapshot] = []
        self._cache._device_blocks.fill_(float("nan"))
        self._step = 0
        self.events = Counter[str]()

    def run(self, sequences: list[Sequence]) -> None:
        """Run sequences to their ends, and check their tokens."""
        while waiting := [one for one in sequences if not one.is_ended]:
            self._run_step(waiting)
        for snapshot in self._snapshots:
            self._release(snapshot.blocks + snapshot.state)
        assert len(self._free) == NUM_BLOCKS
        assert len(self._free_cpu) == NUM_CPU_BLOCKS

    def _run_step(self, sequences: list[Sequence]) -> None:
        rng = self._rng
        plan = StepPlan(self._step, [])
        self._step += 1
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
        pairs.sort(key=lambda pair: pair[1].num_tokens == 1)
        decodes = [pair for pair in pairs if pair[1].num_tokens == 1 and pair[1].is_sampled]
        chunks = [pair for pair in pairs if pair not in decodes]
        growing = [chunk for _, chunk in decodes if chunk.new_block_ids]
        plan.chunks.extend(chunk for _, chunk in chunks)
        packed = Decodes.pack(
            [chunk.row for _, chunk in decodes],
            [chunk.first_position for _, chunk in decodes],
            [chunk.row for chunk in growing],
            [block for chunk in growing for block in chunk.new_block_ids],
        )
        self._launch(plan, packed, chunks + decodes)
        self._snapshots += saved
        for one in planned:
            self._release(one.loaded)
            one.loaded = []

    def _launch(
        self, plan: StepPlan, decodes: Decodes, pairs: list[tuple[Sequence, SequencePlan]]
    ) -> None:
        plan = StepPlan(
            plan.step,
            plan.chunks,
            plan.starts,
            decodes,
            swap_ins=plan.swap_ins,
            copies=plan.copies,
            evictions=plan.evictions,
        )
        pending = self._worker.launch(plan)
        output = pending.output()
        wait_for(lambda: pending.is_copied)
        self._free_cpu += [copy.source for copy in plan.swap_ins]
        sampled = iter(zip(output.token_ids, output.logprobs, strict=True))
        for one, chunk in pairs:
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
                self._leave(one)

    def _chunk(self, one: Sequence) -> SequencePlan:
        num_left = len(one.token_ids) - one.num_computed
        num_tokens = self._rng.randint(1, min(num_left, 70))
        added = self._grow(one, one.num_computed + num_tokens)
        assert one.row is not None
        is_sampled = num_tokens == num_left
        return SequencePlan(one.row, one.num_computed, num_tokens, is_sampled, tuple(added))

    def _start(self, one: Sequence, sequences: list[Sequence], plan: StepPlan) -> None:
        used = {other.row for other in sequences}
        rows = [row for row in range(NUM_ROWS) if row not in used]
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
            self._launch(StepPlan(plan.step, [], swap_ins=plan.swap_ins), Decodes(), [])
            plan.swap_ins.clear()
        elif hits and self._rng.random() < 0.7:
            self.events["hit"] += 1
            hit = max(hits, key=lambda one: len(one.token_ids))
            one.num_computed = len(hit.token_ids)
            one.blocks, one.loaded = self._take(len(hit.blocks)), self._take(self._state_size)
            # Here copies stand for the blocks that sequences share.
            plan.copies.extend(self._copies(hit.blocks + hit.state, one.blocks + one.loaded))
            self._launch(StepPlan(plan.step, [], copies=plan.copies), Decodes(), [])
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
            self._launch(StepPlan(plan.step, [], evictions=plan.evictions), Decodes(), [])
            plan.evictions.clear()
            self._release(blocks)
            return
        self.events["recompute"] += 1
        self._leave(one)

    def _live(self, one: Sequence) -> list[int]:
        assert one.row is not None
        first = NUM_BLOCKS + one.row * self._state_size
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

    def _leave(self, one: Sequence) -> None:
        self._release(one.blocks + one.loaded)
        for block in self._live(one):
            self._cache._device_blocks[block] = float("nan")
        one.blocks, one.loaded, one.row = [], [], None

    def _release(self, blocks: list[int]) -> None:
        for block in blocks:
            self._cache._device_blocks[block] = float("nan")
        self._free += blocks


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
    for case in HYBRID_CASES
]


@pytest.mark.parametrize("case", PARAMS)
def test_states_follow_their_sequences(case: Case, tmp_path: Path) -> None:
    truth = truth_of(case, tmp_path)
    worker = make_worker(truth)
    events = Counter[str]()
    for seed in range(2):
        controller = Controller(worker, random.Random(seed))
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
    assert set(events) == {"save", "hit", "swap", "recompute"}
