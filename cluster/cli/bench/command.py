"""`pagedray bench serve`: a load test of a server, from flags to figures."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from cluster.cli.bench.client import BenchError, Load, Target, send_load
from cluster.cli.bench.datasets import (
    LocalTokenizer,
    RandomLengths,
    random_requests,
    sharegpt_requests,
)
from cluster.cli.bench.summary import latency_table, summarize, total_table
from cluster.cli.client_flags import read_key
from cluster.cli.flag import noted_flags
from cluster.serving.listener import url_host
from pagedray.errors import StartupError
from workers.hub.locate import locate_model

if TYPE_CHECKING:
    import argparse

    from cluster.cli.bench.client import BenchClient, BenchRequest, LoadResult
    from cluster.cli.bench.datasets import TextTokenizer

__all__ = ["bench_serve"]

_FAILURE_EXIT = 1
_BUSY_CLIENT = 0.9


def bench_serve(parsed: argparse.Namespace) -> int:
    """Run a load test and print its figures; return 1 if a request failed. Raises PagedRayError."""
    _check(parsed)
    target = _target(parsed)
    model, result = asyncio.run(_measure(parsed, target))
    limits_ms = dict(parsed.goodput or ())
    percentiles = parsed.metric_percentiles
    summary = summarize(result, percentiles=percentiles, limits_ms=limits_ms)
    report = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "backend": target.backend,
        "base_url": target.base_url,
        "model_id": model,
        "dataset_name": parsed.dataset_name,
        "num_prompts": parsed.num_prompts,
        # JSON has no infinity.
        "request_rate": "inf" if parsed.request_rate == float("inf") else parsed.request_rate,
        "burstiness": parsed.burstiness,
        "max_concurrency": parsed.max_concurrency,
        "seed": parsed.seed,
        **summary.as_json(),
    }
    if parsed.json:
        print(msgspec.json.encode(report).decode())
    else:
        console = Console()
        console.print(total_table(summary, limits_ms))
        console.print(latency_table(summary, parsed.percentile_metrics, percentiles))
    if parsed.save_result:
        _save(parsed, report)
    if summary.client_load > _BUSY_CLIENT:
        print(
            f"pagedray: warning: This client used {summary.client_load:.0%} of a core "
            "and may itself limit the results.",
            file=sys.stderr,
        )
    if not result.failures:
        return 0
    print(
        f"pagedray: error: {len(result.failures)} of {parsed.num_prompts} requests failed, the "
        f"first one: {result.failures[0]}",
        file=sys.stderr,
    )
    return _FAILURE_EXIT


def _check(parsed: argparse.Namespace) -> None:
    """Raise StartupError for flags that would have no effect, or fail after the test."""
    given = noted_flags(parsed)
    for flag in given:
        if parsed.base_url is not None and flag in ("--host", "--port"):
            raise StartupError(f"{flag} cannot be used with --base-url, which names the server.")
    if "--burstiness" in given and parsed.request_rate == float("inf"):
        raise StartupError("--burstiness requires --request-rate.")
    if parsed.dataset_name == "sharegpt":
        if parsed.dataset_path is None:
            raise StartupError("--dataset-name sharegpt requires --dataset-path.")
        for flag in given:
            if flag.startswith("--random-"):
                raise StartupError(f"{flag} requires --dataset-name random.")
    elif parsed.dataset_path is not None:
        raise StartupError("--dataset-path requires --dataset-name sharegpt.")
    elif parsed.sharegpt_output_len is not None:
        raise StartupError("--sharegpt-output-len requires --dataset-name sharegpt.")
    if not parsed.save_result and parsed.result_filename is not None:
        raise StartupError("--result-filename requires --save-result.")
    if not parsed.save_result and "--result-dir" in given:
        raise StartupError("--result-dir requires --save-result.")
    if parsed.save_result and not parsed.result_dir.is_dir():
        raise StartupError(f"--result-dir {parsed.result_dir} is not a folder.")


async def _measure(parsed: argparse.Namespace, target: Target) -> tuple[str, LoadResult]:
    """Return the model's name, and the results of the requests."""
    name = parsed.served_model_name or parsed.model
    async with _client(target) as client:
        model = await client.open(name)
        try:
            requests = await _requests(parsed, _tokenizer(parsed, client))
        except BenchError as error:
            raise BenchError(f"The server cannot tokenize the prompts. {error}") from error
        measured, others = requests[: parsed.num_prompts], requests[parsed.num_prompts :]
        for request in others:
            try:
                await client.stream(request)
            except BenchError as error:
                raise BenchError(f"The server rejected the first request. {error}") from error
        load = Load(
            request_rate=parsed.request_rate,
            burstiness=parsed.burstiness,
            max_concurrency=parsed.max_concurrency,
            seed=parsed.seed,
        )
        return model, await send_load(client, measured, load, has_bar=_has_bar(parsed))


def _has_bar(parsed: argparse.Namespace) -> bool | None:
    """Return whether to show progress; None shows it on a terminal."""
    return False if parsed.disable_tqdm else None


def _client(target: Target) -> BenchClient:
    # Each kind imports its own library.
    if target.is_grpc:
        from cluster.cli.bench.grpc_client import GrpcClient

        return GrpcClient(target)
    from cluster.cli.bench.http_client import HttpClient

    return HttpClient(target)


async def _requests(parsed: argparse.Namespace, tokenizer: TextTokenizer) -> list[BenchRequest]:
    """Return the measured requests, then the warm-up requests."""
    number = parsed.num_prompts + parsed.num_warmups
    if parsed.dataset_name == "sharegpt":
        return await sharegpt_requests(
            tokenizer, number, parsed.dataset_path, parsed.sharegpt_output_len, parsed.seed
        )
    lengths = RandomLengths(
        input_len=parsed.random_input_len,
        output_len=parsed.random_output_len,
        prefix_len=parsed.random_prefix_len,
        range_ratio=parsed.random_range_ratio,
    )
    return await random_requests(tokenizer, number, lengths, parsed.seed, has_bar=_has_bar(parsed))


def _tokenizer(parsed: argparse.Namespace, client: BenchClient) -> TextTokenizer:
    given = parsed.tokenizer
    if given is None and parsed.model is not None and Path(parsed.model).is_dir():
        given = parsed.model
    return client if given is None else LocalTokenizer.from_folder(locate_model(given).folder)


def _target(parsed: argparse.Namespace) -> Target:
    is_grpc = parsed.backend.startswith("grpc")
    scheme, port = ("grpc", 9000) if is_grpc else ("http", 8000)
    return Target(
        backend=parsed.backend,
        base_url=f"{scheme}://{url_host(parsed.host)}:{parsed.port or port}"
        if parsed.base_url is None
        else parsed.base_url,
        endpoint=parsed.endpoint,
        key=read_key(parsed.api_key_file) or os.environ.get("OPENAI_API_KEY") or None,
        ca_file=parsed.tls_ca,
        headers=dict(parsed.header or ()),
        temperature=parsed.temperature,
        ignore_eos=parsed.ignore_eos,
        extra_body=parsed.extra_body or {},
        timeout_s=parsed.timeout_s,
    )


def _save(parsed: argparse.Namespace, report: dict[str, object]) -> None:
    rate = f"{parsed.request_rate:g}qps"
    model = str(report["model_id"]).replace("/", "-")
    name = f"{parsed.backend}-{rate}-{model}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path = parsed.result_dir / (parsed.result_filename or name)
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    except OSError as error:
        raise StartupError(f"Cannot write --save-result to {path}: {error.strerror}.") from error
