"""`pagedray bench latency` and `throughput` with an engine in this process."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, NoReturn

import pytest
from safetensors.torch import load_file

from cluster.cli.bench.datasets import WORKLOADS
from cluster.cli.commands import main
from cluster.llm.llm import LLM
from pagedray.errors import DeviceError
from tests.slow_params import some_slow

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cluster.llm.llm import Generation
    from pagedray.sampling_params import SamplingParams

MODEL = "examples/tiny-llama"
CPU = ("--device=cpu", "--dtype=float32", "--num-threads=1", "--num-blocks=256", "--json")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[Generation]]:
    """What each call of the engine has generated."""
    found: list[list[Generation]] = []
    generate = LLM.generate

    def recorded(
        llm: LLM, prompts: list[list[int]], sampling: Sequence[SamplingParams], *, use_tqdm: bool
    ) -> list[Generation]:
        found.append(generate(llm, prompts, sampling, use_tqdm=use_tqdm))
        return found[-1]

    monkeypatch.setattr(LLM, "generate", recorded)
    return found


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["bench", arguments[0], MODEL, *CPU, *arguments[1:]]) == 0
    report: dict[str, object] = json.loads(capsys.readouterr().out)
    return report


def test_latency_times_batches_of_other_prompts(
    capsys: pytest.CaptureFixture[str], calls: list[list[Generation]], tmp_path: Path
) -> None:
    file = tmp_path / "latency.json"
    lengths = ("--input-len=9", "--output-len=5", "--batch-size=3")
    iters = ("--num-iters=4", "--num-iters-warmup=2")
    report = report_of(capsys, "latency", *lengths, *iters, f"--output-json={file}")
    assert json.loads(file.read_text()) == report
    assert len(calls) == 6
    prompts = [tuple(one.prompt_token_ids) for call in calls for one in call]
    assert {len(prompt) for prompt in prompts} == {9}
    assert len(set(prompts)) == len(prompts) == 18
    assert {len(one.outputs[0].token_ids) for call in calls for one in call} == {5}
    latencies = report["latencies"]
    assert isinstance(latencies, list)
    assert len(latencies) == 4
    assert report["avg_latency"] == pytest.approx(statistics.fmean(latencies))
    percentiles = report["percentiles"]
    assert isinstance(percentiles, dict)
    median = statistics.median(latencies)
    assert percentiles["50"] == pytest.approx(median)
    assert report["ms_per_token"] == pytest.approx(median / 5 * 1e3)
    assert report["output_tokens_per_second"] == pytest.approx(15 / median)


def test_the_roofline_counts_the_tensors_of_the_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lengths = ("--input-len=9", "--output-len=5", "--batch-size=3")
    report = report_of(capsys, "latency", *lengths, "--num-iters=2", "--num-iters-warmup=0")
    roofline = report["roofline"]
    assert isinstance(roofline, dict)
    tensors = load_file(f"{MODEL}/model.safetensors").values()
    # In float32; the head is the embedding, which is therefore read.
    assert roofline["weight_bytes_per_step"] == 4 * sum(tensor.numel() for tensor in tensors)
    # Four layers have four heads of 64 keys and values; a prompt and four tokens are five steps.
    contexts = 3 * sum(range(10, 14))
    assert roofline["kv_bytes_per_step"] == 4 * 2 * 4 * 64 * 4 * contexts / 5
    assert roofline["step_ms"] == pytest.approx(report["ms_per_token"])
    read = roofline["weight_bytes_per_step"] + roofline["kv_bytes_per_step"]
    bytes_per_s = read / roofline["step_ms"] * 1e3
    assert roofline["memory_share"] == pytest.approx(
        bytes_per_s / roofline["read_bytes_per_second"]
    )
    assert roofline["share"] == max(roofline["memory_share"], roofline["compute_share"])
    assert roofline["compute_share"] > 0


@pytest.mark.slow
def test_the_roofline_is_that_of_one_of_two_ranks(
    capsys: pytest.CaptureFixture[str], ray_cluster: None
) -> None:
    lengths = ("--input-len=9", "--output-len=5", "--num-prompts=4")
    roofline = report_of(capsys, "throughput", *lengths, "--tensor-parallel-size=2")["roofline"]
    assert isinstance(roofline, dict)
    tensors = load_file(f"{MODEL}/model.safetensors")
    norms = sum(tensor.numel() for name, tensor in tensors.items() if "norm" in name)
    matrices = sum(tensor.numel() for tensor in tensors.values()) - norms
    assert roofline["weight_bytes_per_step"] == 4 * (matrices / 2 + norms)
    assert roofline["rank"] in (0, 1)
    assert roofline["share"] > 0


def test_a_device_that_cannot_be_measured_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(llm: LLM) -> NoReturn:
        raise DeviceError("Too little GPU memory is free.")

    monkeypatch.setattr(LLM, "measure_rooflines", measure)
    lengths = ("--input-len=9", "--output-len=5", "--num-prompts=1")
    report = report_of(capsys, "throughput", *lengths)
    assert report["roofline"] == {"share": None, "reason": "Too little GPU memory is free."}


def test_throughput_counts_what_the_engine_generated(
    capsys: pytest.CaptureFixture[str], calls: list[list[Generation]]
) -> None:
    lengths = ("--input-len=12", "--output-len=6", "--prefix-len=32", "--random-range-ratio=0.5")
    report = report_of(capsys, "throughput", "--num-prompts=10", *lengths)
    warm_up, measured = calls
    num_prompt = sum(len(one.prompt_token_ids) for one in measured)
    num_output = sum(len(one.outputs[0].token_ids) for one in measured)
    assert report["num_requests"] == len(measured) == len(warm_up) == 10
    assert (report["total_prompt_tokens"], report["total_output_tokens"]) == (
        num_prompt,
        num_output,
    )
    seconds = report["elapsed_time"]
    assert isinstance(seconds, float)
    assert report["output_tokens_per_second"] == pytest.approx(num_output / seconds)
    assert report["requests_per_second"] == pytest.approx(10 / seconds)
    # All prompts have the same beginning, but not that of the warm-up.
    prefixes = {tuple(one.prompt_token_ids[:32]) for one in measured}
    assert len(prefixes) == 1
    assert prefixes.isdisjoint(tuple(one.prompt_token_ids[:32]) for one in warm_up)
    hits = report["prefix_hit_tokens"]
    assert isinstance(hits, int)
    assert hits % 16 == 0
    assert hits <= 9 * 48


def test_workloads_have_the_lengths_of_the_benchmarks() -> None:
    for name, number, prompt, output in (
        ("latency", 1, 128, 256),
        ("decode", 256, 128, 512),
        ("prefill", 128, 4096, 1),
        ("prefix", 512, 2048 + 64, 64),
    ):
        requests = WORKLOADS[name].requests(1000, 0)
        assert len(requests) == number
        assert {(len(one.token_ids), one.max_tokens) for one in requests} == {(prompt, output)}
        assert all(0 <= token < 1000 for one in requests for token in one.token_ids)
    heads = [tuple(one.token_ids[:2048]) for one in WORKLOADS["prefix"].requests(1000, 0)]
    assert len(set(heads)) == 16
    mixed = WORKLOADS["mixed"].requests(1000, 0)
    lengths = [len(one.token_ids) for one in mixed]
    assert len(mixed) == 1000
    # The means of the distributions that were cut off are 249 and 261.
    assert 200 < statistics.fmean(lengths) < 300
    assert 220 < statistics.fmean(one.max_tokens for one in mixed) < 300
    assert min(lengths) >= 4
    assert max(lengths) <= 2048
    assert mixed == WORKLOADS["mixed"].requests(1000, 0)
    assert mixed != WORKLOADS["mixed"].requests(1000, 1)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("throughput", "--workload=decode", "--input-len=5"), "--input-len cannot be used with"),
        (("throughput", "--workload=decode", "--num-prompts=5"), "--num-prompts cannot be used"),
        (("throughput", "--num-prompts=0"), "--num-prompts"),
        (("latency", "--batch-size=0"), "--batch-size"),
        (("latency", "--input-len=100000000"), "--input-len"),
        (("latency", "--input-len=5000", "--num-iters=1"), "context"),
        (("latency", "--num-iters=1", "--output-json=/missing/file.json"), "--output-json"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], reason: str
) -> None:
    try:
        code = main(["bench", arguments[0], MODEL, *CPU, *arguments[1:]])
    except SystemExit as end:
        code = int(str(end.code))
    error = capsys.readouterr().err
    assert code == 2
    assert error.count("\n") == 1
    assert reason in error


@pytest.mark.parametrize("command", some_slow(["latency", "throughput"], slow=["latency"]))
def test_drafts_are_reported(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ("--input-len=9", "--output-len=60")
    more = ("--num-iters=1", "--num-iters-warmup=0", "--batch-size=1")
    given = (*lengths, *(("--num-prompts=1",) if command == "throughput" else more))
    assert "spec_decode_num_drafts" not in report_of(capsys, command, *given)
    report = report_of(capsys, command, *given, "--spec-method=ngram", "--spec-tokens=4")
    accepted, chains = report["spec_decode_accepted_tokens"], report["spec_decode_num_drafts"]
    assert isinstance(accepted, int)
    assert isinstance(chains, int)
    assert accepted > 0
    assert report["spec_decode_acceptance_length"] == pytest.approx(1 + accepted / chains)
