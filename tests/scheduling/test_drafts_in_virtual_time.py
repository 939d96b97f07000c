"""How many drafts are bought, in virtual time: about as many as are best, none if none helps."""

import msgspec
import pytest

from bench.scheduler.drafts import COST, Setting, compare
from cluster.scheduling.kv_manager import KvOptions
from cluster.scheduling.speculation import Speculator
from cluster.simulation.virtual_replica import VirtualHead, VirtualReplica
from pagedray.config import SchedulerConfig, SpeculationConfig
from tests.slow_params import some_slow


@pytest.mark.parametrize(
    ("num_requests", "acceptance", "gap_ms", "least_gain"),
    [(8, 0.8, 0.4, 2.0), (8, 0.8, 2.4, 1.5), (64, 0.8, 0.4, 1.25), (64, 0.0, 0.4, 0.98)],
)
def test_drafts_give_nearly_the_rate_of_the_best_number(
    num_requests: int, acceptance: float, gap_ms: float, least_gain: float
) -> None:
    setting = Setting(acceptance=acceptance, gap_s=gap_ms / 1e3)
    found = compare(num_requests, setting, num_tokens=0)
    assert found.ratio > 0.9
    assert found.adaptive / found.fixed[0] > least_gain


@pytest.mark.parametrize(
    ("num_requests", "least_ratio"), some_slow([(8, 0.95), (128, 0.95)], slow=[(128, 0.95)])
)
def test_guesses_of_a_head_give_nearly_the_rate_of_the_best_number(
    num_requests: int, least_ratio: float
) -> None:
    setting = Setting(acceptance=0.741, gap_s=0.0024, guess_s=0.00092)
    assert compare(num_requests, setting, num_tokens=0).ratio > least_ratio


@pytest.mark.parametrize("has_head", [True, False])
def test_slow_first_steps_do_not_keep_numbers_of_drafts_from_being_tried(has_head: bool) -> None:
    setting = Setting(
        acceptance=0.741,
        gap_s=0.0015,
        launch_s=0.0012,
        capture_s=0.005,
        guess_s=0.00092 if has_head else None,
    )
    assert compare(8, setting, num_tokens=8000).ratio > 0.95


class Load:
    """Four requests that run together on a model with a draft head; another follows each."""

    def __init__(self, head: VirtualHead | None) -> None:
        speculator = None
        if head is not None:
            speculator = Speculator(SpeculationConfig(method="eagle3", num_speculative_tokens=4))
        self.replica = VirtualReplica(
            SchedulerConfig(max_num_seqs=1024, max_num_batched_tokens=8192),
            KvOptions(block_size=16, num_blocks=10_000, num_cpu_blocks=0),
            msgspec.structs.replace(COST, gap_s=0.0024, guess_s=0.00092, feed_s=0.00015),
            max_model_len=4000,
            speculator=speculator,
            head=head,
        )
        self.num_submitted = 0

    def run(self, *, seconds: float) -> float:
        """Return the tokens per second of some seconds."""
        replica = self.replica
        begun_s, num_before = replica.now_s, replica.num_generated_tokens
        while replica.now_s < begun_s + seconds:
            if replica.scheduler.num_open < 4:
                self.num_submitted += 1
                prompt = [1000 + self.num_submitted] * 100
                replica.submit(prompt, num_output_tokens=150, arrival_s=replica.now_s)
            replica.run(num_steps=1)
        return (replica.num_generated_tokens - num_before) / (replica.now_s - begun_s)


def test_a_hopeless_head_costs_less_than_a_percent() -> None:
    head = VirtualHead(acceptance=0.0)
    hopeless, plain = Load(head), Load(None)
    assert hopeless.run(seconds=24.0) > 0.99 * plain.run(seconds=24.0)
    assert head.num_fed < 0.2 * hopeless.replica.num_steps


def test_a_head_that_becomes_good_is_found() -> None:
    head = VirtualHead(acceptance=0.0)
    load = Load(head)
    plain_rate = load.run(seconds=8.0)
    head.acceptance = 0.8
    load.run(seconds=8.0)
    assert load.run(seconds=4.0) > 1.9 * plain_rate
