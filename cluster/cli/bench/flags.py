"""The flags of `pagedray bench serve`, with vLLM's names."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from cluster.cli.bench.latencies import GOALS, METRICS
from cluster.cli.bench.target import Backend
from cluster.cli.client_flags import add_client_flags
from cluster.cli.flag_values import count, number
from cluster.cli.random_request_flags import (
    MOST_REQUESTS,
    add_random_requests,
    add_request_rate,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["add_bench_flags"]

_ALIASES = {"vllm": "openai", "vllm-chat": "openai-chat"}
_MOST_TOKENS = 10_000_000


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Add them in groups."""
    _add_server(parser.add_argument_group("server"))
    _add_dataset(parser.add_argument_group("requests"))
    _add_load(parser.add_argument_group("load"))
    _add_output(parser.add_argument_group("output"))


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--backend",
        type=lambda text: _ALIASES.get(text, text),
        choices=get_args(Backend),
        default="openai",
        help="openai sends completions and openai-chat chat completions to any OpenAI-compatible "
        "server; grpc and grpc-chat call Generate and Chat of PagedRay.",
    )
    group.add_argument(
        "--base-url",
        metavar="URL",
        help="http://HOST:PORT. (default: of --host and --port)",
    )
    group.add_argument("--host", default="127.0.0.1", help="Host of the server.")
    group.add_argument(
        "--port", type=count(1, 65535), metavar="PORT", help="(default: 8000, or 9000 for gRPC)"
    )
    group.add_argument(
        "--endpoint", metavar="PATH", help="Path of HTTP requests. (default: the backend's)"
    )
    group.add_argument(
        "--model", metavar="MODEL", help="Model name in requests. (default: the server's first)"
    )
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="Model name in requests, if --model is the folder or Hub id of its tokenizer.",
    )
    group.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="Folder or Hub id of the tokenizer that counts prompts. (default: --model if it is a "
        "folder, or else the server's, by /tokenize)",
    )
    add_client_flags(group, variables="PAGEDRAY_API_KEY or OPENAI_API_KEY")
    group.add_argument(
        "--header",
        nargs="*",
        type=_header,
        metavar="NAME=VALUE",
        help="Headers of HTTP requests.",
    )
    group.add_argument(
        "--extra-body",
        type=_json_object,
        metavar="JSON",
        help="An object whose fields are added to the body of HTTP requests.",
    )
    group.add_argument(
        "--temperature", type=number(0.0, 2.0), default=0.0, metavar="T", help="Of all requests."
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="Continue after end-of-sequence tokens, so that outputs have their full lengths.",
    )
    group.add_argument(
        "--timeout-s",
        type=number(1.0, 86400.0),
        default=3600.0,
        metavar="SECONDS",
        help="Time after which a request has failed.",
    )


def _add_dataset(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset-name",
        choices=("random", "sharegpt"),
        default="random",
        help="random words, or conversations of --dataset-path.",
    )
    group.add_argument(
        "--dataset-path", type=Path, metavar="FILE", help="ShareGPT conversations in JSON."
    )
    add_random_requests(group)
    group.add_argument(
        "--sharegpt-output-len",
        type=count(1, _MOST_TOKENS),
        metavar="N",
        help="Tokens to generate. (default: as many as the conversation's answer has)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="Of prompts and intervals.")


def _add_load(group: argparse._ArgumentGroup) -> None:
    add_request_rate(group)
    group.add_argument(
        "--burstiness",
        type=number(1e-3, 1e6),
        default=1.0,
        metavar="B",
        help="Shape of the gamma distribution of intervals: 1 is a Poisson process, less is "
        "burstier.",
    )
    group.add_argument(
        "--max-concurrency",
        type=count(1, MOST_REQUESTS),
        metavar="N",
        help="Most requests in flight. (default: no limit)",
    )
    group.add_argument(
        "--num-warmups",
        type=count(1, MOST_REQUESTS),
        default=1,
        metavar="N",
        help="Requests before the measured ones, one after another.",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--percentile-metrics",
        type=_metrics,
        default=",".join(METRICS),
        metavar="NAME,NAME",
        help=f"Latencies to show, of {','.join(METRICS)}.",
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
        help=f"Limits in milliseconds, such as ttft:200, of {','.join(GOALS)}: requests within all "
        "of them count as goodput.",
    )
    group.add_argument("--json", action="store_true", help="Print one JSON object, not a table.")
    group.add_argument(
        "--save-result", action="store_true", help="Write the JSON object to a file too."
    )
    group.add_argument(
        "--result-dir",
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="Where to write the file.",
    )
    group.add_argument(
        "--result-filename",
        metavar="NAME",
        help="(default: of the backend, the rate, the model and the time)",
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
            raise argparse.ArgumentTypeError(f"must be of {','.join(METRICS)}, not {name!r:.80}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    return tuple(map(number(0.0, 100.0), text.split(",")))


def _goal(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in GOALS:
        raise argparse.ArgumentTypeError(
            f"must be NAME:MS with a name of {','.join(GOALS)}, not {text!r:.80}"
        )
    return name, number(0.0, 1e9)(limit)
