"""The flags of `pagedray bench`, with the names of vLLM."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from cluster.cli.bench.client import GOALS, KEY_VARIABLES, METRICS, Backend
from cluster.cli.bench.datasets import WORKLOADS
from cluster.cli.client_flags import add_client_flags
from cluster.cli.flag import NotedFlag, count, flag_adder, number

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "DEFAULT_NUM_PROMPTS",
    "LENGTH_FLAGS",
    "add_bench_flags",
    "add_latency_flags",
    "add_random_requests",
    "add_request_rate",
    "add_throughput_flags",
]

_ALIASES = {"vllm": "openai", "vllm-chat": "openai-chat"}
_MOST_TOKENS = 10_000_000
MOST_REQUESTS = 10_000_000

DEFAULT_NUM_PROMPTS = 1000
LENGTH_FLAGS = {
    "input_len": (1024, "Number of tokens per prompt."),
    "output_len": (128, "Number of tokens to generate per prompt."),
    "prefix_len": (0, "Number of additional tokens that all prompts share at their beginning."),
}
"""Defaults and texts of the lengths of `throughput`, by their names."""
_MOST_REQUESTS = 1_000_000


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `pagedray bench serve` in groups."""
    server = parser.add_argument_group("server")
    _add_server(server)
    _add_request_fields(server)
    _add_dataset(parser.add_argument_group("requests"))
    _add_load(parser.add_argument_group("load"))
    _add_output(parser.add_argument_group("output"))


def _add_server(group: argparse._ArgumentGroup) -> None:
    """Add where the server is, its API and its model."""
    add = flag_adder(group)
    add(
        "--backend: API to send requests to: openai and openai-chat use the completions and chat "
        "completions of any OpenAI-compatible server; grpc and grpc-chat call PagedRay's Generate "
        "and Chat.",
        get_args(Backend),
        "openai",
        type=lambda text: _ALIASES.get(text, text),
    )
    add("--base-url URL: URL of the server, http://HOST:PORT. (default: made of --host and --port)")
    add("--host: Host of the server.", default="127.0.0.1", action=NotedFlag)
    add(
        "--port PORT: Port of the server. (default: 8000, or 9000 for gRPC)",
        count(1, 65535),
        action=NotedFlag,
    )
    add("--endpoint PATH: Path of HTTP requests. (default: that of the backend)")
    add("--model MODEL: Model name in requests. (default: the first model that the server lists)")
    add(
        "--served-model-name NAME: Model name in requests, if --model is the folder or Hub id of "
        "its tokenizer."
    )
    add(
        "--tokenizer MODEL: Folder or Hub id of the tokenizer that counts prompt tokens. (default: "
        "--model if it is a folder, otherwise the server's /tokenize endpoint)"
    )
    add_client_flags(group, variables=KEY_VARIABLES)


def _add_request_fields(group: argparse._ArgumentGroup) -> None:
    """Add the fields of all requests."""
    add = flag_adder(group)
    add("--header NAME=VALUE: Headers added to HTTP requests.", _header, nargs="*")
    add(
        "--extra-body JSON: JSON object of fields to add to the body of HTTP requests.",
        _json_object,
    )
    add("--temperature T: Sampling temperature of all requests.", number(0.0, 2.0), 0.0)
    add("--ignore-eos: Ignore end-of-sequence tokens, so that every output has its full length.")
    add(
        "--timeout-s SECONDS: Time after which a request counts as failed.",
        number(1.0, 86400.0),
        3600.0,
    )


def _add_dataset(group: argparse._ArgumentGroup) -> None:
    add = flag_adder(group)
    add(
        "--dataset-name: random generates prompts of random words; sharegpt reads conversations "
        "from --dataset-path.",
        ("random", "sharegpt"),
        "random",
    )
    add("--dataset-path FILE: JSON file of ShareGPT conversations.", Path)
    add_random_requests(group)
    add(
        "--sharegpt-output-len N: Number of tokens to generate. (default: the length of the answer "
        "in the conversation)",
        count(1, _MOST_TOKENS),
    )
    add("--seed N: Random seed of prompts and intervals.", int, 0)


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = flag_adder(group)
    add_request_rate(group)
    add(
        "--burstiness B: Shape of the gamma distribution of intervals: 1 is a Poisson process, and "
        "smaller values are burstier.",
        number(1e-3, 1e6),
        1.0,
        action=NotedFlag,
    )
    add(
        "--max-concurrency N: Maximum number of requests in flight. (default: no limit)",
        count(1, MOST_REQUESTS),
    )
    add(
        "--num-warmups N: Number of warm-up requests, sent in sequence before the measured "
        "requests.",
        count(1, MOST_REQUESTS),
        1,
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = flag_adder(group)
    add(
        f"--percentile-metrics NAME,NAME: Latencies to show: any of {','.join(METRICS)}.",
        _metrics,
        ",".join(METRICS),
    )
    add("--metric-percentiles P,P: Percentiles to show.", _percentiles, "50,90,99")
    add(
        f"--goodput NAME:MS: Limits in milliseconds, such as ttft:200, on any of {','.join(GOALS)};"
        " requests within all limits count as goodput.",
        _goal,
        nargs="*",
    )
    add("--json: Print one JSON object instead of a table.")
    add("--save-result: Also write the JSON object to a file.")
    add(
        "--result-dir FOLDER: Folder for the file of --save-result.", Path, Path(), action=NotedFlag
    )
    add(
        "--result-filename NAME: Name of the file of --save-result. (default: made of the backend, "
        "the rate, the model and the time)"
    )
    add("--disable-tqdm: Show no progress bar.")


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (equals and name and text.isprintable() and text.isascii()):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {text!r:.80}")
    return name, value


def _json_object(text: str) -> Mapping[str, object]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {text!r:.80}")
    return found


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in METRICS:
            raise argparse.ArgumentTypeError(
                f"must be one of {','.join(METRICS)}, not {name!r:.80}"
            )
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    return tuple(map(number(0.0, 100.0), text.split(",")))


def _goal(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in GOALS:
        raise argparse.ArgumentTypeError(
            f"must be NAME:MS with one of the names {','.join(GOALS)}, not {text!r:.80}"
        )
    return name, number(0.0, 1e9)(limit)


def add_random_requests(group: argparse._ArgumentGroup) -> None:
    """Add the number of requests and their lengths."""
    add = flag_adder(group)
    for text, least, most, default in (
        ("num-prompts N: Number of requests.", 1, MOST_REQUESTS, 1000),
        ("random-input-len N: Number of tokens per random prompt.", 1, _MOST_TOKENS, 1024),
        (
            "random-output-len N: Number of tokens to generate per random prompt.",
            1,
            _MOST_TOKENS,
            128,
        ),
        (
            "random-prefix-len N: Number of additional tokens that random prompts share at their "
            "beginning.",
            0,
            _MOST_TOKENS,
            0,
        ),
    ):
        add(f"--{text}", count(least, most), default, action=NotedFlag)
    add(
        "--random-range-ratio R: Draw lengths uniformly from 1 - R to 1 + R times the given "
        "length.",
        number(0.0, 1.0),
        0.0,
        action=NotedFlag,
    )


def add_request_rate(group: argparse._ArgumentGroup) -> None:
    """Add how often a request is sent."""
    add = flag_adder(group)
    add(
        "--request-rate R: Requests per second, at random intervals; inf sends all at once.",
        number(1e-6, math.inf),
        math.inf,
        action=NotedFlag,
    )


def add_latency_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a batch that is generated again and again."""
    group = parser.add_argument_group("benchmark")
    add = flag_adder(group)
    tokens = count(1, _MOST_TOKENS)
    add("--input-len N: Number of tokens per prompt.", tokens, 32)
    add("--output-len N: Number of tokens to generate per prompt.", tokens, 128)
    add("--batch-size N: Number of prompts per batch.", tokens, 8)
    add("--num-iters N: Number of measured batches.", tokens, 30)
    add(
        "--num-iters-warmup N: Number of warm-up batches before the measured batches.",
        count(0, _MOST_TOKENS),
        10,
    )
    _add_json_output(group)


def add_throughput_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of requests that are submitted at once."""
    group = parser.add_argument_group("benchmark")
    add = flag_adder(group)
    add(
        "--workload: Named set of requests, which replaces the flags for their number and lengths. "
        "(default: random prompts)",
        tuple(WORKLOADS),
    )
    add(
        f"--num-prompts N: Number of requests. (default: {DEFAULT_NUM_PROMPTS})",
        count(1, _MOST_REQUESTS),
    )
    for name, (default, what) in LENGTH_FLAGS.items():
        flag = name.replace("_", "-")
        text = f"--{flag} --random-{flag} N: {what} (default: {default})"
        add(text, count(min(default, 1), _MOST_TOKENS))
    add(
        "--random-range-ratio R: Draw lengths uniformly from 1 - R to 1 + R times the given "
        "length. (default: 0)",
        number(0.0, 1.0),
    )
    _add_json_output(group)


def _add_json_output(group: argparse._ArgumentGroup) -> None:
    add = flag_adder(group)
    add("--seed N: Random seed of prompts and lengths.", int, 0)
    add("--json: Print one JSON object instead of a table.")
    add("--output-json FILE: Also write the JSON object to a file.", Path)
    add("--disable-tqdm: Show no progress bar.")
