"""How many drafts are bought, in virtual time: about as many as are best, none if none helps."""

import pytest

from bench.scheduler.drafts import compare


@pytest.mark.parametrize(
    ("num_requests", "acceptance", "least_gain"), [(8, 0.8, 2.0), (64, 0.8, 1.25), (64, 0.0, 0.98)]
)
def test_drafts_give_nearly_the_rate_of_the_best_number(
    num_requests: int, acceptance: float, least_gain: float
) -> None:
    found = compare(num_requests, acceptance, num_tokens=0)
    assert found.ratio > 0.9
    assert found.adaptive / found.fixed[0] > least_gain
