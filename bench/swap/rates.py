"""How fast blocks are copied between the pools of one rank, and what steps lose meanwhile."""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.swap.engine import wait_until_pinned
from cluster.engine.engine_options import EngineOptions, engine_config
from pagedray.batch import BlockCopy, SequencePlan, SequenceStart, StepPlan, pack_token_ids
from pagedray.sampling_params import SamplingParams
from workers.decoder_worker import DecoderWorker
from workers.parallel.group import SoloGroup

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pagedray.node_memory import NodeMemory
    from workers.runner.pending_tokens import PendingTokens

__all__ = ["measured_rates"]

NUM_ROWS = 64
CONTEXT = 1024
BLOCK_SIZE = 16
ROUNDS = 5
WARM_STEPS = 20
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "top_p": SamplingParams(temperature=0.7, top_p=0.95, seed=1, ignore_eos=True),
}
_POLL_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRate:
    """The best of several rounds of one plan with copies."""

    direction: str
    order: str
    """Whether blocks are `adjacent`, or `scattered` over both pools."""
    num_blocks: int
    """In each direction."""
    block_bytes: int
    gb_per_s: float
    """Of both directions together, in 10^9 bytes per second."""
    launch_ms: float
    """Time of the host for the launch."""
    is_batched: bool
    """Whether the driver copies many blocks in one call."""
    pin_s: float
    """From the end of the rank's start until the CPU pool was pinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRate:
    """Decode steps of 64 sequences."""

    sampling: str
    """`greedy`, or `top_p` with a temperature."""
    copies: str
    """Those under way all the time: `none`, `out`, `in` or `both`."""
    tokens_per_s: float
    relative: float
    """To steps without copies, before and after."""
    swap_gb_per_s: float


def measured_rates(
    folder: Path, *, num_blocks: int, num_steps: int, memory: NodeMemory | None
) -> Iterator[CopyRate | DecodeRate]:
    """Measure copies of this many blocks in each direction, then decode steps beside a quarter.

    The CPU pool is in the `memory`, or private without it.
    """
    bench = _Bench(folder, num_blocks=num_blocks, num_steps=num_steps, memory=memory)
    for order in ("scattered", "adjacent"):
        for direction in ("out", "in", "both"):
            yield bench.copy_rate(direction, order)
    runs = ("none", "out", "in", "both", "none", "both", "none")
    for sampling in SAMPLING:
        measured = [(copies, *bench.decode_rate(copies, sampling)) for copies in runs]
        alone = [rate for copies, rate, _ in measured if copies == "none"]
        for copies, rate, swap_rate in measured:
            yield DecodeRate(
                sampling=sampling,
                copies=copies,
                tokens_per_s=round(rate, 1),
                relative=round(rate / (sum(alone) / len(alone)), 4),
                swap_gb_per_s=round(swap_rate, 2),
            )
    bench.close()


class _Bench:
    """A rank, and blocks beside those of its sequences."""

    def __init__(
        self, folder: Path, *, num_blocks: int, num_steps: int, memory: NodeMemory | None
    ) -> None:
        self._num_blocks = num_blocks
        self._num_steps = num_steps
        self._row_blocks = -(-(CONTEXT + WARM_STEPS + num_steps + 1) // BLOCK_SIZE)
        self._first_spare = NUM_ROWS * self._row_blocks
        options = EngineOptions(
            load_format="dummy",
            max_num_seqs=NUM_ROWS,
            max_num_batched_tokens=2048,
            max_model_len=self._row_blocks * BLOCK_SIZE,
            num_blocks=self._first_spare + 2 * num_blocks,
            num_cpu_blocks=2 * num_blocks,
        )
        worker = self._worker = DecoderWorker(
            engine_config(folder, options),
            SoloGroup(),
            pool_address=None if memory is None else memory.address,
        )
        worker.load_weights(lambda done, total: None)
        worker.allocate_cache(self._first_spare + 2 * num_blocks, 2 * num_blocks)
        worker.warm_up()
        worker.capture_graphs()
        self._pin_s = wait_until_pinned(worker)
        self._step = 0

    def copy_rate(self, direction: str, order: str) -> CopyRate:
        copies = self._copies(direction, order, self._num_blocks)
        best_s, best_launch_s = float("inf"), float("inf")
        for _ in range(ROUNDS):
            began_s = time.perf_counter()
            pending = self._launch([], copies)
            best_launch_s = min(best_launch_s, time.perf_counter() - began_s)
            while not pending.is_copied:
                time.sleep(_POLL_S)
            best_s = min(best_s, time.perf_counter() - began_s)
            pending.output()
        size = self._worker._spec.block_bytes
        num_copied = sum(len(one) for one in copies)
        assert self._worker._runner is not None
        copier = self._worker._runner._cache._copier
        return CopyRate(
            direction=direction,
            order=order,
            num_blocks=self._num_blocks,
            block_bytes=size,
            gb_per_s=round(num_copied * size / best_s / 1e9, 2),
            launch_ms=round(best_launch_s * 1e3, 3),
            is_batched=copier._batched is not None,
            pin_s=round(self._pin_s, 2),
        )

    def decode_rate(self, direction: str, sampling: str) -> tuple[float, float]:
        """Return tokens per second and GB per second of copies."""
        copies = self._copies(direction, "scattered", max(self._num_blocks // 4, 1))
        starts = [
            SequenceStart(
                row,
                pack_token_ids([5] * CONTEXT),
                CONTEXT,
                list(range(row * self._row_blocks, (row + 1) * self._row_blocks)),
                SAMPLING[sampling],
                row,
                0,
            )
            for row in range(NUM_ROWS)
        ]
        pending: deque[PendingTokens] = deque()
        began_s, num_copied, copying = 0.0, 0, None
        for step in range(WARM_STEPS + self._num_steps):
            if step == WARM_STEPS:
                began_s, num_copied = time.perf_counter(), 0
            sequences = [
                SequencePlan(row, CONTEXT - 1 + step, 1, is_sampled=True) for row in range(NUM_ROWS)
            ]
            are_due = any(copies) and (copying is None or copying.is_copied)
            launched = self._launch(
                sequences, copies if are_due else ([], []), starts if step == 0 else []
            )
            pending.append(launched)
            if are_due:
                copying = launched
                num_copied += sum(len(one) for one in copies)
            if len(pending) == 2:
                pending.popleft().output()
        while pending:
            pending.popleft().output()
        seconds = time.perf_counter() - began_s
        num_bytes = num_copied * self._worker._spec.block_bytes
        return NUM_ROWS * self._num_steps / seconds, num_bytes / seconds / 1e9

    def close(self) -> None:
        self._worker.close()

    def _launch(
        self,
        sequences: list[SequencePlan],
        copies: tuple[list[BlockCopy], list[BlockCopy]],
        starts: list[SequenceStart] | None = None,
    ) -> PendingTokens:
        swap_outs, swap_ins = copies
        plan = StepPlan(self._step, sequences, starts or [], swap_outs=swap_outs, swap_ins=swap_ins)
        self._step += 1
        return self._worker.launch(plan)

    def _copies(
        self, direction: str, order: str, num_blocks: int
    ) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """Return copies to the host and from there, between blocks of their own."""
        device, host = list(range(self._num_blocks)), list(range(self._num_blocks))
        if order == "scattered":
            draws = random.Random(3)
            draws.shuffle(device)
            draws.shuffle(host)
        outs = [
            BlockCopy(self._first_spare + device[index], host[index]) for index in range(num_blocks)
        ]
        ins = [
            BlockCopy(
                self._num_blocks + host[index],
                self._first_spare + self._num_blocks + device[index],
            )
            for index in range(num_blocks)
        ]
        return (
            outs if direction in ("out", "both") else [],
            ins if direction in ("in", "both") else [],
        )
