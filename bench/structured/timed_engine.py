"""An engine of 64 endless sequences, over a rank whose forward pass takes a given time."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.controller import SimulatedRanks
from pagedray.batch import StepOutput
from pagedray.request import FinishReason, Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.engine.engine_loop import EngineLoop
    from cluster.scheduling.event import TokenEvent
    from pagedray.batch import StepMasks, StepPlan
    from pagedray.errors import EngineError

__all__ = ["EOS_TOKEN_ID", "EndlessSink", "TimedExecutor", "pick_token"]

EOS_TOKEN_ID = 0
_FORWARD_S = 0.015


class TimedExecutor(SimulatedRanks):
    """A rank whose forward pass takes a given time, and that samples any allowed token."""

    def __init__(self) -> None:
        super().__init__()
        self._plans: SimpleQueue[StepPlan | None] = SimpleQueue()
        self._masks: SimpleQueue[StepMasks | None] = SimpleQueue()
        self._outputs: SimpleQueue[StepOutput] = SimpleQueue()
        self._masked_rows: set[int] = set()
        self._generator = random.Random(0)
        self.step_times: list[tuple[float, int]] = []
        """When each step ended, and how many sequences it sampled."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit_plan(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    def send_masks(self, masks: StepMasks) -> None:
        self._masks.put(masks)

    def collect_output(self) -> StepOutput:
        output = self._outputs.get()
        self._step = output.step
        return output

    def close(self) -> None:
        # A stopped controller sends no masks for the last plan.
        self._masks.put(None)
        self._plans.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (plan := self._plans.get()) is not None:
            began_s = time.perf_counter()
            for start in plan.starts:
                self._masked_rows.discard(start.row)
                if start.mask_start is not None:
                    self._masked_rows.add(start.row)
            rows = [one.row for one in plan.sequences if one.is_sampled]
            num_masked = sum(row in self._masked_rows for row in rows)
            masks: deque[Any] = deque()  # Any: parts of an array
            if num_masked:
                if (given := self._masks.get()) is None:
                    return
                masks += np.array_split(np.frombuffer(given.words, np.uint32), num_masked)
            token_ids = [
                pick_token(masks.popleft(), self._generator) if row in self._masked_rows else 300
                for row in rows
            ]
            time.sleep(max(0.0, began_s + _FORWARD_S - time.perf_counter()))
            self.step_times.append((time.perf_counter(), len(rows)))
            self._outputs.put(StepOutput(plan.step, token_ids))


class EndlessSink:
    """Replaces each request that ends by a new one, until there were enough steps."""

    def __init__(self) -> None:
        self.controller: EngineLoop | None = None
        self.requests: dict[str, Request] = {}
        self._ids = itertools.count()

    def submit(self, request: Request) -> None:
        """Submit a request with an id of its own."""
        assert self.controller is not None
        named = Request(
            id=f"{next(self._ids):032x}",
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            seed=request.seed,
            eos_token_ids=request.eos_token_ids,
            grammar=request.grammar,
        )
        self.requests[named.id] = named
        self.controller.submit_request(named)

    def publish(self, events: Sequence[TokenEvent]) -> None:
        """Take the events of one step."""
        for event in events:
            if event.finish_reason is FinishReason.ERROR:
                raise AssertionError("A sequence broke.")
            if event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                self.submit(self.requests.pop(event.request_id))

    def fail_all(self, error: EngineError) -> None:
        """Ignore the end of the engine."""


def pick_token(words: Any, generator: random.Random) -> int:
    """Return a token that a mask allows; the end-of-sequence token only if there is no other.

    It is -1 if the mask allows none.
    """
    places = np.flatnonzero(words)
    if not len(places):
        return -1
    for _ in range(4):
        place = int(places[generator.randrange(len(places))])
        word = int(words[place])
        bits = [bit for bit in range(32) if word >> bit & 1]
        token_id = place * 32 + generator.choice(bits)
        if token_id != EOS_TOKEN_ID:
            return token_id
    return EOS_TOKEN_ID
