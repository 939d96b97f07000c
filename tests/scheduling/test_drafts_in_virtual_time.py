"""How many drafts are bought, in virtual time: about as many as are best, none if none helps."""

import pytest

from bench.scheduler.drafts import Setting, compare


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
