"""The output of `pagedray serve` when it is ready: model, capacity and addresses."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from cluster.serving.connections.listener import url_host
from pagedray.text import pluralize

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from cluster.engine.stats import EngineStats
    from pagedray.config import EngineConfig

__all__ = ["address_lines", "ready_lines"]


def ready_lines(config: EngineConfig, stats: EngineStats) -> Iterator[str]:
    """Yield lines about the model, its device and the capacity of its KV cache."""
    model = config.model
    ranks = config.parallel.tensor_parallel_size
    device = config.parallel.device.upper() if config.parallel.device == "cpu" else "CUDA"
    weights = "" if model.quantization is None else f", {model.quantization.method} weights"
    yield (
        f"{model.architecture} on {device} in {model.dtype}{weights}, {pluralize(ranks, 'rank')}, "
        f"context length {config.max_model_len}"
    )
    num_blocks = stats.scheduler.num_blocks
    if num_blocks:
        block_size = config.cache.block_size
        num_full = num_blocks // -(-config.max_model_len // block_size)
        most = min(num_full, stats.scheduler.max_num_seqs)
        dtype = config.cache.kv_cache_dtype
        yield (
            f"KV cache of {num_blocks * block_size} tokens in "
            f"{model.dtype if dtype == 'auto' else dtype}: "
            f"{pluralize(most, 'request')} of full length at once"
        )
    if config.sampling_defaults:
        values = ", ".join(f"{name} {value:g}" for name, value in config.sampling_defaults)
        yield f"Requests that set nothing else use {values}"


def address_lines(
    model: str,
    host: str,
    *,
    http_port: int | None,
    grpc_port: int | None,
    has_tls: bool,
    allowed_hosts: Collection[str] | None = None,
) -> Iterator[str]:
    """Yield the URLs of the frontends; the last line says that the server is ready.

    `allowed_hosts` are the names by which clients may reach a server without keys; None allows all.
    """
    if allowed_hosts is not None and "*" not in allowed_hosts and not _is_loopback(host):
        names = ", ".join(("localhost", *allowed_hosts))
        yield (
            f"Without API keys, HTTP requests must name the server by an IP address, or by "
            f"{names}; others get 421. Add names with --allowed-hosts, or keys with --api-key."
        )
    s, host = "s" if has_tls else "", url_host(host)
    url = f"http{s}://{host}:{http_port}"
    yield f"Page {url}/  API {url}/docs  metrics {url}/metrics"
    yield f"Ready: {model} at {url}/v1 and grpc{s}://{host}:{grpc_port}. Press Ctrl-C to stop."


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
