"""The desired number of replicas: a pure function of their reports."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from cluster.serving.ray_serve.replica_engine import ReplicaLoad, TokensPolicy, desired_replicas

if TYPE_CHECKING:
    from collections.abc import Sequence

LOADS = st.lists(
    st.builds(
        ReplicaLoad,
        tokens_in_flight=st.floats(0, 1e6, allow_nan=False),
        kv_use=st.floats(0, 1, allow_nan=False),
    ),
    max_size=20,
)
COUNTS = st.integers(0, 40)


def wanted(loads: Sequence[ReplicaLoad], num_target: int, *, spare: float = 0.1) -> int:
    return desired_replicas(
        loads, num_target=num_target, target_tokens=10_000, target_kv_use=0.7, spare=spare
    )


@given(LOADS, COUNTS)
def test_the_load_fits_the_desired_replicas(loads: list[ReplicaLoad], num_target: int) -> None:
    number = wanted(loads, num_target)
    assert sum(one.tokens_in_flight for one in loads) <= number * 10_000 + 1e-6
    assert sum(one.kv_use for one in loads) <= number * 0.7 + 1e-9


@given(LOADS, COUNTS)
def test_no_more_than_needed_are_added(loads: list[ReplicaLoad], num_target: int) -> None:
    needed = max(
        sum(one.tokens_in_flight for one in loads) / 10_000,
        sum(one.kv_use for one in loads) / 0.7,
    )
    assert wanted(loads, num_target) <= max(num_target, math.ceil(needed))


@given(LOADS, COUNTS)
def test_the_desired_number_is_stable_once_it_is_reached(
    loads: list[ReplicaLoad], num_target: int
) -> None:
    number = wanted(loads, num_target)
    # The same load after scaling: no oscillation.
    assert wanted(loads, number) == number


@given(LOADS, st.integers(1, 40), st.floats(0, 1e5, allow_nan=False))
def test_more_load_never_needs_fewer_replicas(
    loads: list[ReplicaLoad], num_target: int, more: float
) -> None:
    busier = [*loads, ReplicaLoad(tokens_in_flight=more, kv_use=0.0)]
    assert wanted(busier, num_target) >= wanted(loads, num_target)


def test_a_load_at_the_threshold_changes_nothing() -> None:
    border = ReplicaLoad(tokens_in_flight=9_500, kv_use=0.1)
    assert wanted([border, border], 2) == 2
    # One replica would suffice, but with less than a tenth of headroom.
    half = ReplicaLoad(tokens_in_flight=4_750, kv_use=0.1)
    assert wanted([half, half], 2) == 2
    assert wanted([half, half], 2, spare=0.0) == 1


def test_waiting_prompts_count_though_no_block_is_taken() -> None:
    queued = ReplicaLoad(tokens_in_flight=35_000, kv_use=0.0)
    assert wanted([queued], 1) == 4


def test_without_target_tokens_the_blocks_decide() -> None:
    load = ReplicaLoad(tokens_in_flight=1e9, kv_use=0.8)
    number = desired_replicas(
        [load], num_target=1, target_tokens=None, target_kv_use=0.7, spare=0.1
    )
    assert number == 2


def context(metrics: dict[str, dict[str, float]], *, current: int, target: int) -> SimpleNamespace:
    return SimpleNamespace(
        aggregated_metrics=metrics, current_num_replicas=current, target_num_replicas=target
    )


def test_replicas_without_reports_keep_the_number() -> None:
    policy = TokensPolicy(target_tokens=10_000, target_kv_use=0.7)
    reports = {"tokens_in_flight": {"a": 100.0}, "kv_use": {"a": 0.01}}
    assert policy(context(reports, current=1, target=3)) == (1, {})
    assert policy(context(reports, current=3, target=3)) == (3, {})
    assert policy(context({}, current=2, target=2)) == (2, {})
    busy = {"tokens_in_flight": {"a": 45_000.0}, "kv_use": {"a": 0.5}}
    assert policy(context(busy, current=3, target=3)) == (5, {})
