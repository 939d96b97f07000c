"""Fakes of ranks, of their model and of the sink of events."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.engine.executor import Executor, RankHealth
from cluster.scheduling.event import TokenEvent
from pagedray.batch import DiskReport, StepMasks, StepOutput, StepPlan
from pagedray.config import CacheSize, KernelReport
from pagedray.errors import EngineError
from pagedray.model_config import ModelConfig
from pagedray.request import FinishReason


def unused_model(*, max_positions: int) -> ModelConfig:
    """Return the configuration of a model that no rank computes."""
    return ModelConfig(
        name="none",
        folder=Path(),
        architecture="none",
        vocab_size=100,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=8,
        max_positions=max_positions,
    )


class FakeExecutor(Executor):
    """Ranks that sample one token without computing, with failures to inject."""

    def __init__(self, *, num_blocks: int = 64) -> None:
        self._num_blocks = num_blocks
        self._plans: deque[StepPlan] = deque()
        self._acknowledged_step = -1
        self.step_failures: deque[Exception] = deque()
        """Raised by the next calls of `collect_output`."""
        self.submit_failures: deque[Exception] = deque()
        self.restart_failures: deque[Exception] = deque()
        """Raised by the next restarts."""
        self.num_restarts = 0
        self.masks: list[StepMasks] = []
        """The masks that were sent."""
        self.step_s = 0.0
        """Duration of a step."""
        self.token_id = 7
        """What every sequence samples; -1 if its logits are not finite."""
        self.may_step = threading.Event()
        """Steps end only while this is set."""
        self.may_step.set()

    @property
    def cache_size(self) -> CacheSize:
        return CacheSize(num_blocks=self._num_blocks, num_cpu_blocks=0, block_bytes=0)

    @property
    def kernels(self) -> KernelReport:
        return KernelReport("fake", {"decode": {"fake": 1}})

    def poll_ranks(self) -> tuple[int, Sequence[DiskReport]]:
        return self._acknowledged_step, ()

    def submit_plan(self, plan: StepPlan) -> None:
        if self.submit_failures:
            raise self.submit_failures.popleft()
        self._plans.append(plan)

    def send_masks(self, masks: StepMasks) -> None:
        self.masks.append(masks)

    def collect_output(self) -> StepOutput:
        self.may_step.wait()
        time.sleep(self.step_s)
        if self.step_failures:
            raise self.step_failures.popleft()
        plan = self._plans.popleft()
        self._acknowledged_step = plan.step
        return StepOutput(plan.step, [self.token_id] * plan.num_sampled)

    def observe_ranks(self, now_s: float) -> RankHealth:
        return RankHealth(is_busy=bool(self._plans))

    def restart_ranks(self) -> bool:
        self.num_restarts += 1
        self._plans.clear()
        self._acknowledged_step = -1
        if self.restart_failures:
            raise self.restart_failures.popleft()
        return False

    def close(self) -> None:
        self._plans.clear()


class RecordingSink:
    """Records the tokens and the ends of sequences."""

    def __init__(self) -> None:
        self.tokens: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self.ends: defaultdict[tuple[str, int], list[FinishReason | EngineError]] = defaultdict(
            list
        )
        self.lethal: set[tuple[str, int]] = set()
        """Sequences of requests that are said to kill their ranks."""

    def expect(self, request_id: str, n: int = 1) -> None:
        """Note that the sequences of a request must end."""
        for index in range(n):
            self.ends[request_id, index].clear()

    @property
    def num_open(self) -> int:
        """Sequences that have not ended."""
        return sum(not ends for ends in self.ends.values())

    def publish(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            key = event.request_id, event.index
            assert not self.ends[key], "an event follows the last"
            self.tokens[key] += event.token_ids
            if event.finish_reason is not None:
                self.ends[key].append(event.finish_reason)
            if event.is_lethal:
                self.lethal.add(key)

    def fail_all(self, error: EngineError) -> None:
        for ends in self.ends.values():
            if not ends:
                ends.append(error)


def wait_for(is_true: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait until `is_true` returns true; fail after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline_s, "It did not happen in time."
        time.sleep(0.001)
