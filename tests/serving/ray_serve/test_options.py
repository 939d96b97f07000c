"""Options of a Serve application, its pace, and the number of its replicas."""

from __future__ import annotations

import asyncio
import math
from contextlib import ExitStack
from dataclasses import fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.engine_options import EngineOptions
from cluster.serving.ray_serve.autoscaling import ReplicaLoad, TokensPolicy, desired_replicas
from cluster.serving.ray_serve.options import MessagePace, ServeOptions, read_arguments
from pagedray.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Message


def test_numbers_may_be_strings() -> None:
    given = {"model": "m", "num_replicas": "2", "num_blocks": "64", "enable_prefix_cache": "false"}
    arguments = read_arguments(given)
    assert arguments.model == "m"
    assert arguments.serve == ServeOptions(num_replicas=2)
    assert arguments.engine == EngineOptions(num_blocks=64, enable_prefix_cache=False)


def test_engine_options_may_have_the_names_of_vllm() -> None:
    given = {
        "model": "m",
        "gpu_memory_utilization": "0.5",
        "max_model_len": "32K",
        "enable_prefix_caching": False,
        "dtype": "auto",
        "disable_log_stats": True,
    }
    assert read_arguments(given).engine == EngineOptions(
        memory_fraction=0.5, max_model_len=32768, enable_prefix_cache=False
    )


def test_absent_arguments_are_the_defaults() -> None:
    arguments = read_arguments({"model": "m", "max_model_len": None})
    assert (arguments.engine, arguments.serve) == (EngineOptions(), ServeOptions())


def test_option_names_are_unique() -> None:
    names = [field.name for kind in (EngineOptions, ServeOptions) for field in fields(kind)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"model": None},
            "model is required: a Hub id, or the path of a checkpoint folder on every node.",
        ),
        ({"num_block": 1}, "Unknown argument 'num_block'; did you mean num_blocks?"),
        ({"num_replica": 1}, "Unknown argument 'num_replica'; did you mean num_replicas?"),
        (
            {"no_prefix_cache": True},
            "Unknown argument 'no_prefix_cache'; did you mean enable_prefix_cache = false?",
        ),
        ({"frobnicate": 1}, "Unknown argument 'frobnicate'; known arguments are model, "),
        ({"enable_lora": True}, "enable_lora is not supported: merge the adapter"),
        (
            {"gpu_memory_utilization": "0.5", "memory_fraction": "0.5"},
            "memory_fraction and another name of memory_fraction cannot be used together.",
        ),
        (
            {"num_blocks": "many"},
            "Invalid value 'many' of argument num_blocks: Expected `int | null`, got `str`.",
        ),
        ({"num_blocks": True}, "Invalid value True of argument num_blocks: "),
        ({"device": "tpu"}, "Invalid value 'tpu' of argument device: allowed are cuda, cpu."),
        ({"num_replicas": 0}, "num_replicas must be at least 1, not 0."),
        ({"num_replicas": 3, "max_replicas": 2}, "max_replicas must be at least 3, not 2."),
        ({"target_kv_use": 0}, "target_kv_use must be greater than 0 and at most 1, not 0.0."),
        ({"drain_timeout_s": -1}, "drain_timeout_s must be at least 0, not -1.0."),
        ({"stall_timeout_s": float("nan")}, "stall_timeout_s must be at least 1, not nan."),
        ({"placement_strategy": "WIDE"}, "Invalid value 'WIDE' of argument placement_strategy: "),
        ({"lease_s": 4.9}, "lease_s must be at least 5, not 4.9."),
        ({"log_format": "xml"}, "Invalid value 'xml' of argument log_format: "),
        ({"tool_call_format": "xml"}, "Invalid value 'xml' of argument tool_call_format: "),
        ({"log_level": "loud"}, "Invalid value 'loud' of argument log_level: "),
    ],
)
def test_invalid_options_are_named_in_one_line(
    given: dict[str, Any], text: str
) -> None:  # Any: all
    with pytest.raises(StartupError) as caught:
        read_arguments({"model": "m"} | given)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


def test_a_model_may_have_several_names() -> None:
    names = ["tiny", "other"]
    serve = read_arguments({"model": "m", "served_model_name": names}).serve
    assert serve.served_names == ("tiny", "other")
    assert read_arguments({"model": "m", "served_model_name": "a"}).serve.served_names == ("a",)
    assert read_arguments({"model": "m"}).serve.served_names == ()


PART = {"type": "http.response.body", "body": b"data: x\n\n", "more_body": True}
END = {"type": "http.response.body", "body": b"", "more_body": False}
HEAD = {"type": "http.response.start", "status": 200, "headers": []}


def test_streams_that_have_started_share_the_message_rate() -> None:
    pace = MessagePace(800.0)
    with pace.stream() as first, pace.stream():
        assert pace.pause_s(first) == pace.pause_s(first) == 1 / 800
        with ExitStack() as stack:
            for _ in range(63):
                last = stack.enter_context(pace.stream())
                pace.pause_s(last)
            assert pace.pause_s(first) == 64 / 800
        assert pace.pause_s(first) == 1 / 800


@pytest.mark.asyncio
async def test_a_part_is_sent_at_once_and_its_stream_waits() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    # One message per thousand seconds.
    with MessagePace(1e-3).stream() as stream:
        paced = stream.paced(send)
        await asyncio.wait_for(paced(HEAD), 60)
        waiting = asyncio.ensure_future(paced(PART))
        await asyncio.sleep(0.01)
        assert sent == [HEAD, PART]
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait_for(paced(END), 60)
        assert sent[-1] == END


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


def test_blocks_of_a_group_of_layers_hold_a_part_of_their_tokens() -> None:
    loads = SimpleNamespace(num_blocks=90, num_free_blocks=60, num_queued_tokens=5)
    load = ReplicaLoad.from_loads(loads, 16 / 3)  # type: ignore[arg-type]  # what it reads
    assert load.tokens_in_flight == pytest.approx(30 / 3 * 16 + 5)
    assert load.kv_use == pytest.approx(1 / 3)


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
