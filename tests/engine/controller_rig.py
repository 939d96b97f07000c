"""A controller with fake ranks, of which tests record all events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.engine.crash_search import DeathBudget
from cluster.engine.engine_loop import EngineLoop
from pagedray.config import EngineConfig
from pagedray.request import Request
from pagedray.sampling_params import SamplingParams
from tests.fakes import FakeExecutor, RecordingSink, unused_model, wait_for

if TYPE_CHECKING:
    from cluster.engine.watchdog import EngineClock
    from pagedray.request import Grammar


class Rig:
    """A controller with fake ranks and a recording sink."""

    def __init__(
        self,
        executor: FakeExecutor | None = None,
        *,
        first_pause_s: float = 0.001,
        clock: EngineClock | None = None,
    ) -> None:
        self.executor = FakeExecutor() if executor is None else executor
        self.sink = RecordingSink()
        budget = DeathBudget(
            max_barren=5, barren_s=0.0, first_pause_s=first_pause_s, max_pause_s=first_pause_s
        )
        self.controller = EngineLoop(
            config(), self.executor, self.sink, death_budget=budget, clock=clock
        )

    def submit(
        self,
        request_id: str,
        *,
        n: int = 1,
        max_tokens: int = 5,
        num_prompt_tokens: int = 3,
        deadline_s: float | None = None,
        seed: int = 0,
        grammar: Grammar | None = None,
    ) -> None:
        self.sink.expect(request_id, n)
        self.controller.submit_request(
            Request(
                id=request_id,
                prompt_token_ids=tuple(range(num_prompt_tokens)),
                sampling=SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True),
                seed=seed,
                deadline_s=deadline_s,
                grammar=grammar,
            )
        )

    def ends(self) -> dict[tuple[str, int], object]:
        """Return the end of each sequence, once all have one."""
        wait_for(lambda: not self.sink.num_open)
        assert all(len(ends) == 1 for ends in self.sink.ends.values())
        return {key: ends[0] for key, ends in self.sink.ends.items()}


def config() -> EngineConfig:
    return EngineConfig(model=unused_model(max_positions=200))
