"""What becomes of a request when a method of the scheduler fails with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.scheduling.kv_manager import KvManager, KvOptions
from cluster.scheduling.scheduler import Scheduler
from pagedray.batch import StepOutput
from pagedray.config import SchedulerConfig
from pagedray.request import FinishReason, Request
from pagedray.sampling_params import SamplingParams

if TYPE_CHECKING:
    import pytest

    from cluster.scheduling.sequence import Sequence


def test_no_token_follows_one_that_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(
        config=SchedulerConfig(),
        kv=KvOptions(
            block_size=3,
            num_blocks=8,
            num_cpu_blocks=0,
            enable_cpu_prefix_cache=False,
        ),
        max_model_len=24,
    )
    request = Request(
        id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=2), seed=0
    )
    scheduler.add_request(request)
    # The second step is planned before the first one ends, and has the last token.
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert None not in plans

    def fail(_: KvManager, sequence: Sequence) -> None:
        raise RuntimeError(f"A defect with {sequence.request_id}.")

    with monkeypatch.context() as patch:
        patch.setattr(KvManager, "register_blocks", fail)
        assert scheduler.update(StepOutput(0, [7])) == []
    assert scheduler.update(StepOutput(1, [8])) == []
    scheduler.acknowledge(1)
    (event,) = scheduler.repair()
    assert (event.request_id, event.finish_reason) == ("r", FinishReason.ERROR)
    assert not scheduler.has_work
