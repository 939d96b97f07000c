"""`pagedray simulate`: figures, plots and bad input."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.simulation import MEASURED, measured_figure, simulated_figure
from cluster.cli.commands import main
from cluster.cli.parser import make_parser
from cluster.cli.simulate_flags import set_sizes
from cluster.simulation.step_cost import LLAMA_8B_H200, StepCost

COST = '{"points": [[0, 0.01], [1, 0.01]]}'
REQUEST = '{"arrival_s": 0, "num_prompt_tokens": 4, "num_output_tokens": 3}\n'


def test_predictions_are_near_what_an_h200_measured() -> None:
    for workload in MEASURED:
        assert simulated_figure(workload) == pytest.approx(measured_figure(workload), rel=0.15)


def test_a_trace_gives_the_times_that_follow_from_the_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost, trace, plot = tmp_path / "cost.json", tmp_path / "trace.jsonl", tmp_path / "plot.svg"
    cost.write_text(COST)
    trace.write_text(REQUEST + "\n" + REQUEST.replace("0,", "1,", 1))
    flags = ["--cost", str(cost), "--trace", str(trace), "--plot", str(plot), "--json"]
    assert main(["simulate", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    # A step of 10 ms gives each token; the second request arrives after 1 s.
    assert report["p50_ttft_ms"] == pytest.approx(10.0)
    assert report["p99_e2el_ms"] == pytest.approx(30.0)
    assert report["duration"] == pytest.approx(1.03)
    assert report["total_output_tokens"] == 6
    titles = [one.text for one in ElementTree.parse(plot).iter() if one.get("font-weight")]
    assert len(titles) == 4


def test_replicas_share_the_load_and_keep_prefixes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-prompts=200", "--request-rate=100", "--random-input-len=20", "--json"]
    flags += ["--random-prefix-len=512", "--num-prefixes=10", "--num-tenants=2"]
    rates = []
    for num_replicas in (1, 4):
        assert main(["simulate", *flags, f"--num-replicas={num_replicas}"]) == 0
        report = json.loads(capsys.readouterr().out)
        rates.append(report["prefix_cache_hit_rate"])
        assert report["completed"] == 200
    # 20 prompts find no prefix of their tenant; if each replica had all prefixes, 80 would not.
    assert rates[0] == pytest.approx(180 / 200 * 512 / 532, rel=0.01)
    assert rates[1] > 1.2 * 120 / 200 * 512 / 532


def test_layers_with_windows_use_as_many_blocks_as_their_queries_see(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.jsonl").write_text(REQUEST.replace("4", "16000"))
    flags = [f"--trace={tmp_path / 'trace.jsonl'}", "--num-blocks=2000", "--json"]
    flags.append("--max-num-batched-tokens=160")
    peaks = []
    for windows in ([], ["--layer-windows=0"], ["--layer-windows=0,3x160"], ["--layer-windows=16"]):
        assert main(["simulate", *flags, *windows]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["peak_kv_use"])
    # The prompt has 1000 blocks. Each block of all layers has the memory of 4 blocks of a layer.
    assert peaks == pytest.approx(
        [1001 / 2000, 1001 / 2000, (1001 + 3 * 21) / 8000, 12 / 2000], rel=0.01
    )


def test_windows_that_no_query_reaches_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-prompts=80", "--random-input-len=600", "--random-output-len=300", "--json"]
    flags += ["--num-blocks=320", "--num-cpu-blocks=160", "--preemption=swap", "--no-prefix-cache"]
    reports = []
    for windows in ([], ["--layer-windows=2x0,2x100000"]):
        assert main(["simulate", *flags, *windows]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0]["swap_preemptions"]
    assert reports[1] == reports[0]


def test_unset_sizes_are_those_of_a_server_on_the_device_of_the_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cost.json").write_text(COST)
    load = ["--num-prompts=1024", "--random-input-len=8", "--random-output-len=64", "--json"]
    peaks = []
    for flags in ([], ["--max-num-seqs=1024"], [f"--cost={tmp_path / 'cost.json'}"]):
        assert main(["simulate", *load, *flags]) == 0
        samples = json.loads(capsys.readouterr().out)["samples"]
        peaks.append(max(sample["num_running"] for sample in samples))
    assert peaks == [1024, 1024, 256]
    parsed = make_parser().parse_args(["simulate", "--num-cpu-blocks=0"])
    set_sizes(parsed)
    assert (parsed.num_cpu_blocks, parsed.max_num_batched_tokens) == (0, 8192)


def test_drafts_make_few_requests_faster(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--num-prompts=2", "--random-input-len=8", "--random-output-len=2000", "--json"]
    reports = []
    for flags in (
        [],
        ["--num-speculative-tokens=4", "--draft-acceptance=0"],
        ["--num-speculative-tokens=4"],
        ["--num-speculative-tokens=4", "--draft-acceptance=1"],
    ):
        assert main(["simulate", *load, *flags]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    plain, wrong, usual, right = (one["output_throughput"] for one in reports)
    assert plain > wrong > 0.9 * plain
    assert 1.5 * plain < usual < right < 5 * plain
    assert "spec_decode_acceptance_rate" not in reports[0]
    assert reports[1]["spec_decode_accepted_tokens"] == 0
    # Of four drafts in a row, each is right with a probability of 0.7.
    length = reports[2]["spec_decode_acceptance_length"]
    assert length == pytest.approx(sum(0.7**place for place in range(5)), rel=0.1)
    assert reports[3]["spec_decode_acceptance_length"] == pytest.approx(5, rel=0.05)


def test_parts_of_a_figure_are_indented_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--num-prompts=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.rstrip("0123456789.% ") for line in lines if "%" in line]
    assert names[:3] == ["Prefix cache hits", "  in the CPU pool", "    read from the disk"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{}", "`arrival_s`"),
        ("nonsense", "malformed"),
        ('"\\xff', "malformed"),
        (REQUEST.replace("4", "0"), "num_prompt_tokens must be"),
        (REQUEST.replace("4", '"4"'), "Expected `int`"),
        (REQUEST.replace("0,", "1e99,", 1), "arrival_s must be"),
        (REQUEST.replace("}", ', "prompt": "hello"}'), "unknown field `prompt`"),
    ],
)
def test_a_line_that_is_no_request_is_named(
    line: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f"{REQUEST}\n{line}")
    assert main(["simulate", "--trace", str(trace)]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert f"Line 3 of {trace} is not a valid request: " in message
    assert reason in message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"points": []}',
        '{"points": [[0, 0], [1, 0]]}',
        '{"points": [[2, 1], [1, 2]]}',
        '{"points": [[1, 1], [2, 0.9999998]]}',
        '{"points": [[1, 4760000], [2, 4760000]]}',
        f'{{"points": [[0, 1], [{10**400}, 1]]}}',
    ],
)
def test_bad_costs_are_rejected(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = tmp_path / "cost.json"
    cost.write_text(text)
    assert main(["simulate", "--cost", str(cost)]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert "is not a JSON file of the costs of steps" in message


@pytest.mark.parametrize("windows", ["", "x", "0,", "2x", "-1", "1x2x3", "0x5", "256x0,1", "1e3"])
def test_bad_windows_are_rejected(windows: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", f"--layer-windows={windows}"])
    assert ended.value.code == 2
    assert "--layer-windows: must " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--request-rate=1e-6", "--num-prompts=2000"], "arrival_s must be"),
        (["--num-prefixes=2"], "--num-prefixes requires --random-prefix-len"),
        (["--draft-acceptance=0.5"], "--draft-acceptance requires --num-speculative-tokens"),
        (["--random-input-len=10000000", "--random-range-ratio=1"], "num_prompt_tokens must be"),
        (["--random-input-len=6000000", "--random-prefix-len=6000000"], "num_prompt_tokens must"),
    ],
)
def test_flags_that_are_valid_alone_are_rejected_together(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *flags]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert reason in message


@pytest.mark.parametrize(
    "flag",
    [
        "--num-prompts=1000",
        "--request-rate=5",
        "--random-prefix-len=0",
        "--random-range-ratio=0.5",
        "--num-prefixes=2",
        "--num-tenants=2",
        "--seed=0",
    ],
)
def test_flags_of_random_requests_are_rejected_beside_a_trace(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(REQUEST)
    assert main(["simulate", "--trace", str(trace), flag]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert f"{flag.partition('=')[0]} cannot be used with --trace" in message


def test_loads_from_before_an_idle_time_do_not_route(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost, trace = tmp_path / "cost.json", tmp_path / "trace.jsonl"
    cost.write_text(COST)
    line = REQUEST.replace("4", "5000").replace("3", "20").replace("}", ', "num_prefix_tokens": ')
    line = line.strip() + '4000, "prefix": "rules"}\n'
    # The first one runs when the loads are reported after 1 s, and its replica is idle at 100 s.
    trace.write_text(line.replace("0,", "0.95,", 1) + line.replace("0,", "100.15,", 1))
    flags = ["--cost", str(cost), "--trace", str(trace), "--num-replicas=2", "--num-blocks=400"]
    assert main(["simulate", *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["prefix_cache_hit_rate"] == pytest.approx(0.4)


def test_what_the_queue_rejects_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-prompts=20", "--max-queued-requests=5", "--max-num-seqs=1"]
    assert main(["simulate", *flags]) == 1
    assert "rejected 15 of 20 requests, the first one: " in capsys.readouterr().err


def test_times_between_and_beyond_points_are_linear() -> None:
    cost = StepCost(points=((1, 1.0), (3, 2.0), (5, 6.0)))
    assert [cost.tokens_s(number) for number in (1, 2, 3, 4, 5, 6)] == [
        1.0,
        1.5,
        2.0,
        4.0,
        6.0,
        8.0,
    ]
    assert LLAMA_8B_H200.tokens_s(8192) == pytest.approx(179.5e-3)
