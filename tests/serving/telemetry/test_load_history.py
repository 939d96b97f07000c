"""The history of a server's load: rates, latencies, and how much of it is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cluster.engine.stats import DurationHistogram
from cluster.serving.telemetry.load_history import LATENCY_BOUNDS_S, LoadRecorder
from tests.serving.waiting import wait_until

if TYPE_CHECKING:
    import httpx

    from cluster.engine.stats import EngineStats
    from tests.serving.conftest import Server
    from tests.serving.fake_engine import FakeEngine


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
