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
from cluster.cli.flag import NotedFlag, count, number

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
    group.add_argument(
        "--backend",
        type=lambda text: _ALIASES.get(text, text),
        choices=get_args(Backend),
        default="openai",
        help="API to send requests to: openai and openai-chat use the completions and chat "
        "completions of any OpenAI-compatible server; grpc and grpc-chat call PagedRay's "
        "Generate and Chat.",
    )
    group.add_argument(
        "--base-url",
        metavar="URL",
        help="URL of the server, http://HOST:PORT. (default: made of --host and --port)",
    )
    group.add_argument("--host", action=NotedFlag, default="127.0.0.1", help="Host of the server.")
    group.add_argument(
        "--port",
        action=NotedFlag,
        type=count(1, 65535),
        metavar="PORT",
        help="Port of the server. (default: 8000, or 9000 for gRPC)",
    )
    group.add_argument(
        "--endpoint", metavar="PATH", help="Path of HTTP requests. (default: that of the backend)"
    )
    group.add_argument(
        "--model",
        metavar="MODEL",
        help="Model name in requests. (default: the first model that the server lists)",
    )
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="Model name in requests, if --model is the folder or Hub id of its tokenizer.",
    )
    group.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="Folder or Hub id of the tokenizer that counts prompt tokens. (default: --model if "
        "it is a folder, otherwise the server's /tokenize endpoint)",
    )
    add_client_flags(group, variables=KEY_VARIABLES)


def _add_request_fields(group: argparse._ArgumentGroup) -> None:
    """Add the fields of all requests."""
    group.add_argument(
        "--header",
        nargs="*",
        type=_header,
        metavar="NAME=VALUE",
        help="Headers added to HTTP requests.",
    )
    group.add_argument(
        "--extra-body",
        type=_json_object,
        metavar="JSON",
        help="JSON object of fields to add to the body of HTTP requests.",
    )
    group.add_argument(
        "--temperature",
        type=number(0.0, 2.0),
        default=0.0,
        metavar="T",
        help="Sampling temperature of all requests.",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="Ignore end-of-sequence tokens, so that every output has its full length.",
    )
    group.add_argument(
        "--timeout-s",
        type=number(1.0, 86400.0),
        default=3600.0,
        metavar="SECONDS",
        help="Time after which a request counts as failed.",
    )


def _add_dataset(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset-name",
        choices=("random", "sharegpt"),
        default="random",
        help="random generates prompts of random words; sharegpt reads conversations from "
        "--dataset-path.",
    )
    group.add_argument(
        "--dataset-path", type=Path, metavar="FILE", help="JSON file of ShareGPT conversations."
    )
    add_random_requests(group)
    group.add_argument(
        "--sharegpt-output-len",
        type=count(1, _MOST_TOKENS),
        metavar="N",
        help="Number of tokens to generate. (default: the length of the answer in the "
        "conversation)",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="Random seed of prompts and intervals."
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    add_request_rate(group)
    group.add_argument(
        "--burstiness",
        action=NotedFlag,
        type=number(1e-3, 1e6),
        default=1.0,
        metavar="B",
        help="Shape of the gamma distribution of intervals: 1 is a Poisson process, and smaller "
        "values are burstier.",
    )
    group.add_argument(
        "--max-concurrency",
        type=count(1, MOST_REQUESTS),
        metavar="N",
        help="Maximum number of requests in flight. (default: no limit)",
    )
    group.add_argument(
        "--num-warmups",
        type=count(1, MOST_REQUESTS),
        default=1,
        metavar="N",
        help="Number of warm-up requests, sent in sequence before the measured requests.",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--percentile-metrics",
        type=_metrics,
        default=",".join(METRICS),
        metavar="NAME,NAME",
        help=f"Latencies to show: any of {','.join(METRICS)}.",
    )
    group.add_argument(
        "--metric-percentiles",
        type=_percentiles,
        default="50,90,99",
        metavar="P,P",
        help="Percentiles to show.",
    )
    group.add_argument(
        "--goodput",
        nargs="*",
        type=_goal,
        metavar="NAME:MS",
        help=f"Limits in milliseconds, such as ttft:200, on any of {','.join(GOALS)}; requests "
        "within all limits count as goodput.",
    )
    group.add_argument(
        "--json", action="store_true", help="Print one JSON object instead of a table."
    )
    group.add_argument(
        "--save-result", action="store_true", help="Also write the JSON object to a file."
    )
    group.add_argument(
        "--result-dir",
        action=NotedFlag,
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="Folder for the file of --save-result.",
    )
    group.add_argument(
        "--result-filename",
        metavar="NAME",
        help="Name of the file of --save-result. (default: made of the backend, the rate, the "
        "model and the time)",
    )
    group.add_argument("--disable-tqdm", action="store_true", help="Show no progress bar.")


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
    for flag, least, most, default, what in (
        ("--num-prompts", 1, MOST_REQUESTS, 1000, "Number of requests."),
        ("--random-input-len", 1, _MOST_TOKENS, 1024, "Number of tokens per random prompt."),
        (
            "--random-output-len",
            1,
            _MOST_TOKENS,
            128,
            "Number of tokens to generate per random prompt.",
        ),
        (
            "--random-prefix-len",
            0,
            _MOST_TOKENS,
            0,
            "Number of additional tokens that random prompts share at their beginning.",
        ),
    ):
        group.add_argument(
            flag,
            action=NotedFlag,
            type=count(least, most),
            default=default,
            metavar="N",
            help=what,
        )
    group.add_argument(
        "--random-range-ratio",
        action=NotedFlag,
        type=number(0.0, 1.0),
        default=0.0,
        metavar="R",
        help="Draw lengths uniformly from 1 - R to 1 + R times the given length.",
    )


def add_request_rate(group: argparse._ArgumentGroup) -> None:
    """Add how often a request is sent."""
    group.add_argument(
        "--request-rate",
        action=NotedFlag,
        type=number(1e-6, math.inf),
        default=math.inf,
        metavar="R",
        help="Requests per second, at random intervals; inf sends all at once.",
    )


def add_latency_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a batch that is generated again and again."""
    group = parser.add_argument_group("benchmark")
    for flag, default, what in (
        ("--input-len", 32, "Number of tokens per prompt."),
        ("--output-len", 128, "Number of tokens to generate per prompt."),
        ("--batch-size", 8, "Number of prompts per batch."),
        ("--num-iters", 30, "Number of measured batches."),
    ):
        group.add_argument(
            flag, type=count(1, _MOST_TOKENS), default=default, metavar="N", help=what
        )
    group.add_argument(
        "--num-iters-warmup",
        type=count(0, _MOST_TOKENS),
        default=10,
        metavar="N",
        help="Number of warm-up batches before the measured batches.",
    )
    _add_json_output(group)


def add_throughput_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of requests that are submitted at once."""
    group = parser.add_argument_group("benchmark")
    group.add_argument(
        "--workload",
        choices=tuple(WORKLOADS),
        help="Named set of requests, which replaces the flags for their number and lengths. "
        "(default: random prompts)",
    )
    group.add_argument(
        "--num-prompts",
        type=count(1, _MOST_REQUESTS),
        metavar="N",
        help=f"Number of requests. (default: {DEFAULT_NUM_PROMPTS})",
    )
    for name, (default, what) in LENGTH_FLAGS.items():
        group.add_argument(
            f"--{name.replace('_', '-')}",
            f"--random-{name.replace('_', '-')}",
            type=count(min(default, 1), _MOST_TOKENS),
            metavar="N",
            help=f"{what} (default: {default})",
        )
    group.add_argument(
        "--random-range-ratio",
        type=number(0.0, 1.0),
        metavar="R",
        help="Draw lengths uniformly from 1 - R to 1 + R times the given length. (default: 0)",
    )
    _add_json_output(group)


def _add_json_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="Random seed of prompts and lengths."
    )
    group.add_argument(
        "--json", action="store_true", help="Print one JSON object instead of a table."
    )
    group.add_argument(
        "--output-json", type=Path, metavar="FILE", help="Also write the JSON object to a file."
    )
    group.add_argument("--disable-tqdm", action="store_true", help="Show no progress bar.")
