"""Metrics and the history of load: names, bounds, and counts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.engine.stats import DurationHistogram
from cluster.serving.inputs import Arrival, CallOrigin, GenerationInput
from cluster.serving.telemetry.load_history import LATENCY_BOUNDS_S, LoadRecorder
from pagedray.errors import InvalidRequestError, OverloadedError, RequestError
from tests.serving.conftest import wait_until
from tests.serving.fake_engine import FakeEngine

if TYPE_CHECKING:
    import httpx
    from prometheus_client.samples import Sample

    from cluster.engine.stats import EngineStats
    from cluster.serving.servicer import Servicer
    from tests.serving.conftest import Server

DOCUMENT = Path("docs/observability.md")


async def run(servicer: Servicer, **given: object) -> None:
    fields: dict[str, object] = {"prompts": ("hello",), "sampling": {"max_tokens": 5}} | given
    generation = await servicer.start_generation(GenerationInput(**fields))  # type: ignore[arg-type]  # checked by the test
    try:
        async for _ in generation.outputs():
            pass
    finally:
        generation.close()


def samples(servicer: Servicer) -> list[Sample]:
    text = servicer.metrics.render().decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def value(servicer: Servicer, name: str, **labels: str) -> float:
    found = [
        sample.value
        for sample in samples(servicer)
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert found, f"{name}{labels} is not exported"
    return sum(found)


async def test_document_lists_what_is_exported(servicer: Servicer) -> None:
    await run(servicer)
    text = servicer.metrics.render().decode()
    exported = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    # Creation times of counters, which the library adds, are not documented.
    exported = {name: kind for name, kind in exported.items() if not name.endswith("_created")}
    rows = re.findall(r"^\| `([\w:]+)` \| (\w+) \|", DOCUMENT.read_text(), re.MULTILINE)
    assert len(rows) == len(dict(rows))
    assert dict(rows) == exported


async def test_document_lists_the_labels(servicer: Servicer) -> None:
    await run(servicer)
    with pytest.raises(InvalidRequestError):
        await run(servicer, prompts=("",))
    documented = {
        name: set(re.findall(r"`(\w+)`", labels))
        for name, labels in re.findall(
            r"^\| `([\w:]+)` \| \w+ \|([^|]*)\|", DOCUMENT.read_text(), re.MULTILINE
        )
    }
    for family in text_string_to_metric_families(servicer.metrics.render().decode()):
        own = {label for sample in family.samples for label in sample.labels} - {"le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        # The library also exports creation times of counters.
        if own and not name.endswith("_created"):
            assert documented[name] == own, name


async def test_call_is_counted_with_its_times_and_tokens(servicer: Servicer) -> None:
    await run(servicer, origin=CallOrigin(frontend="grpc"), tenant="")
    labels = {"frontend": "grpc", "outcome": "length"}
    assert value(servicer, "pagedray_requests_total", **labels) == 1
    assert value(servicer, "pagedray_request_prompt_tokens_count") == 1
    assert value(servicer, "pagedray_request_generated_tokens_sum") == 5
    assert value(servicer, "pagedray_time_to_first_token_seconds_count") == 1
    assert value(servicer, "pagedray_time_per_output_token_seconds_count") == 1
    assert value(servicer, "pagedray_queue_time_seconds_count") == 1
    gaps = value(servicer, "pagedray_inter_token_latency_seconds_count")
    assert 0 <= gaps <= 4
    assert value(servicer, "vllm:inter_token_latency_seconds_count") == gaps
    assert value(servicer, "pagedray_tenant_tokens_total", kind="generated") == 5


async def test_dashboards_of_vllm_find_the_times_and_ends_of_calls(servicer: Servicer) -> None:
    await run(servicer)
    model = {"model_name": "tiny"}
    # Those that vLLM's own dashboard queries.
    for name in (
        *("prefill_time_seconds", "decode_time_seconds", "inference_time_seconds"),
        *("time_per_output_token_seconds", "prompt_tokens", "generation_tokens"),
        *("queue_time_seconds",),
    ):
        assert value(servicer, f"vllm:request_{name}_count", **model) == 1, name
    assert value(servicer, "vllm:request_generation_tokens_sum", **model) == 5
    parts = [
        value(servicer, f"vllm:request_{one}_time_seconds_sum") for one in ("prefill", "decode")
    ]
    assert sum(parts) == pytest.approx(value(servicer, "vllm:request_inference_time_seconds_sum"))
    assert value(servicer, "vllm:request_success_total", **model, finished_reason="length") == 1
    generation = await servicer.start_generation(GenerationInput(prompts=("hello",)))
    generation.close()
    with pytest.raises(InvalidRequestError):
        await run(servicer, prompts=("",))
    ends = [one for one in samples(servicer) if one.name == "vllm:request_success_total"]
    found = {one.labels["finished_reason"]: one.value for one in ends}
    assert found == {"abort": 1, "length": 1, "stop": 0}


async def test_tokens_in_flight_are_those_of_open_calls(servicer: Servicer) -> None:
    given = GenerationInput(prompts=("hello",), sampling={"max_tokens": 200, "n": 2})
    generation = await servicer.start_generation(given)
    num_prompt_tokens = len(servicer.tokenizer.encode("hello"))
    in_flight = value(servicer, "pagedray_tokens_in_flight")
    assert in_flight == num_prompt_tokens + 2 * 200
    generation.close()
    assert value(servicer, "pagedray_tokens_in_flight") == 0
    assert value(servicer, "pagedray_requests_total", outcome="cancelled") == 1


async def test_rejections_are_counted_by_reason(servicer: Servicer) -> None:
    origin = CallOrigin(frontend="http")
    for given in ({"prompts": ("",)}, {"model": "other"}, {"prompts": ("x " * 4000,)}):
        with pytest.raises(RequestError):
            await run(servicer, origin=origin, **given)
    engine = servicer.client.engine
    assert isinstance(engine, FakeEngine)
    engine.rejection = OverloadedError("full")
    with pytest.raises(OverloadedError):
        await run(servicer, origin=origin)
    for reason in ("invalid", "unknown_model", "too_large", "overloaded"):
        labels = {"frontend": "http", "reason": reason}
        assert value(servicer, "pagedray_rejections_total", **labels) == 1
    assert value(servicer, "pagedray_tokens_in_flight") == 0


async def test_input_of_clients_creates_no_series(servicer: Servicer) -> None:
    await run(servicer)
    await run(servicer, client_id="first")
    before = {(one.name, *sorted(one.labels.items())) for one in samples(servicer)}
    for number in range(50):
        await run(
            servicer,
            client_id=f"id-{number}-{{}}",
            model=None,
            sampling={"max_tokens": 1 + number, "seed": number},
            origin=CallOrigin(traceparent=f"bad-{number}", tracestate="x"),
        )
    assert {(one.name, *sorted(one.labels.items())) for one in samples(servicer)} == before


async def test_tenants_beyond_a_bound_share_a_label(servicer: Servicer) -> None:
    for number in range(400):
        watch = servicer.observer.watch_call(Arrival(operation="chat", tenant=f"t{number}"))
        watch.note_end("stop")
    tenants = [one for one in samples(servicer) if one.name == "pagedray_tenant_requests_total"]
    assert len(tenants) == 257
    assert value(servicer, "pagedray_tenant_requests_total", tenant="(other)") == 400 - 256


async def test_metrics_that_routers_read_are_exported(servicer: Servicer) -> None:
    model = {"model_name": "tiny"}
    assert value(servicer, "vllm:num_requests_running", **model) == 0
    assert value(servicer, "vllm:num_requests_waiting", **model) == 0
    # The fake engine has 60 of 64 blocks free.
    assert value(servicer, "vllm:kv_cache_usage_perc", **model) == pytest.approx(4 / 64)
    config = {"block_size": "16", "num_gpu_blocks": "64"}
    assert value(servicer, "vllm:cache_config_info", **model, **config) == 1
    assert value(servicer, "vllm:prefix_cache_queries_total", **model) == 10
    assert value(servicer, "vllm:prefix_cache_hits_total", **model) == 4
    assert value(servicer, "vllm:spec_decode_num_drafts_total", **model) == 5
    assert value(servicer, "vllm:spec_decode_num_draft_tokens_total", **model) == 20
    assert value(servicer, "vllm:spec_decode_num_accepted_tokens_total", **model) == 7
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert value(servicer, per_position, **model, position="1") == 2


def make_recorder() -> LoadRecorder:
    return LoadRecorder(DurationHistogram(LATENCY_BOUNDS_S))


@pytest.fixture
def stats(engine: FakeEngine) -> EngineStats:
    return engine.stats()


def test_samples_have_the_rates_of_their_interval(stats: EngineStats) -> None:
    recorder = make_recorder()
    recorder.add_sample(stats, 10.0)
    recorder.add_sample(replace(stats, num_generated_tokens=150, num_prompt_tokens=70), 14.0)
    (sample,) = recorder.history().samples
    assert (sample.generated_tokens_per_s, sample.prompt_tokens_per_s) == (25.0, 5.0)
    assert (sample.uptime_s, sample.num_used_blocks) == (14.0, 4)
    assert sample.first_token_p50_s is None


def test_latencies_are_those_of_the_durations(stats: EngineStats) -> None:
    between_tokens = DurationHistogram(LATENCY_BOUNDS_S)
    recorder = LoadRecorder(between_tokens)
    recorder.add_sample(stats, 0.0)
    for number in range(1, 101):
        recorder.first_token.record(number / 100)
        between_tokens.record(number / 10_000)
    recorder.add_sample(stats, 5.0)
    history = recorder.history()
    assert history.samples[0].first_token_p50_s == pytest.approx(0.5, rel=0.1)
    assert history.samples[0].first_token_p95_s == pytest.approx(0.95, rel=0.1)
    assert history.first_token.num_durations == 100
    assert history.first_token.p90_s == pytest.approx(0.9, rel=0.1)
    assert history.between_tokens.p99_s == pytest.approx(0.0099, rel=0.1)


def test_durations_of_before_the_last_minute_are_left_out(stats: EngineStats) -> None:
    recorder = make_recorder()
    recorder.first_token.record(100.0)
    for number in range(13):
        recorder.add_sample(stats, 5.0 * number)
        recorder.first_token.record(1.0)
    history = recorder.history()
    # Those of the last interval follow with the next sample.
    assert history.first_token.num_durations == 12
    assert history.first_token.p99_s == pytest.approx(1.0, rel=0.1)


def test_ten_minutes_are_kept(stats: EngineStats) -> None:
    recorder = make_recorder()
    for number in range(500):
        recorder.add_sample(stats, 5.0 * number)
    history = recorder.history()
    span_s = history.samples[-1].uptime_s - history.samples[0].uptime_s + history.interval_s
    assert (len(history.samples), span_s) == (120, 600.0)


def test_calls_are_recorded(http: httpx.Client, server: Server) -> None:
    observer = server.frontends.servicer.observer
    recorder, recorded = observer.recorder, observer.metrics.times.between_tokens
    before = recorder.first_token.snapshot(), recorded.snapshot()
    body = {"model": "tiny", "prompt": "a", "max_tokens": 5, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        chunks = [line for line in response.iter_lines() if '"text"' in line]
    first_token = recorder.first_token.snapshot().since(before[0])
    between_tokens = recorded.snapshot().since(before[1])
    # Tokens that arrive at once are one output, and a chunk.
    assert first_token.num_durations == 1
    assert between_tokens.num_durations == len(chunks) - 1


async def test_the_server_takes_samples_by_itself(stats: EngineStats) -> None:
    recorder = make_recorder()
    moments = iter((1.0, 2.0))
    recorder.start_sampling(lambda: stats, lambda: next(moments))
    recorder.stop_sampling()
    recorder.start_sampling(lambda: stats, lambda: next(moments))
    recorder.stop_sampling()
    await wait_until(lambda: len(recorder.history().samples) == 1)


def test_history_is_served_with_the_properties_of_the_server(http: httpx.Client) -> None:
    history = http.get("/loads/history").json()
    assert (history["interval_s"], history["num_blocks"]) == (5.0, 64)
    info = http.get("/server_info").json()
    assert (info["model"], info["device"], info["context_length"]) == ("tiny", "cpu", 256)
    # What the ranks chose, not what the configuration asks for.
    assert info["attention_backend"] == "torch_sdpa (native, torch kernels)"


def test_larger_bins_have_the_same_durations() -> None:
    bounds_s = (0.001, 0.01, 0.1)
    fine = DurationHistogram(sorted({*LATENCY_BOUNDS_S, *bounds_s}))
    coarse = DurationHistogram(bounds_s)
    for number in range(1, 400):
        fine.record(number / 1000)
        coarse.record(number / 1000)
    assert fine.snapshot().in_bins(bounds_s) == coarse.snapshot()
