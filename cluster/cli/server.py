"""`pagedray serve`: an engine behind its frontends, until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from cluster.cli.process import discard_output
from cluster.engine.frozen_heap import freeze_heap
from cluster.engine.open_engine import open_engine
from cluster.engine.progress import progress_reports
from cluster.serving.engine_client import EngineClient
from cluster.serving.frontends import Frontends
from cluster.serving.listener import url_host
from cluster.serving.text.tokenizer import Tokenizer
from pagedray.config import StepLimits
from pagedray.errors import StartupError
from pagedray.text import pluralize

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from cluster.engine.engine_loop import EngineLoop
    from cluster.engine.stats import EngineStats
    from cluster.serving.auth import Authenticator
    from cluster.serving.frontend_options import FrontendOptions
    from cluster.serving.telemetry.tracing import Tracer
    from cluster.serving.tls import CertificateStore
    from pagedray.config import EngineConfig

__all__ = ["Server", "address_lines", "ready_lines"]

logger = logging.getLogger(__name__)

_INTERRUPT_DRAIN_S = 2.0
"""Upper bound of the drain time after Ctrl-C, where a user is waiting."""
_LOADING_GRACE_S = 2.5
_POLL_S = 0.5
_SWITCH_INTERVAL_S = 0.001
_OUTAGE_EXIT = 1
_LOOPBACKS = ("127.0.0.1", "::1", "localhost")

_LIMIT_S = 30.0
_GUARD_POLL_S = 1.0
_EXIT_CODE = 1


class Server:
    """One replica with its frontends in this process."""

    def __init__(
        self,
        config: EngineConfig,
        options: FrontendOptions,
        *,
        authenticator: Authenticator,
        certificates: CertificateStore | None = None,
        tracer: Tracer | None = None,
        drain_s: float,
    ) -> None:
        """`drain_s` is the time that running requests have after SIGTERM."""
        self._config = config
        self._options = options
        self._authenticator = authenticator
        self._certificates = certificates
        self._tracer = tracer
        self._drain_s = drain_s
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._has_lost_ray = False

    def serve_until_stopped(self) -> int:
        """Serve until SIGINT or SIGTERM; return the exit code. Raises StartupError."""
        return asyncio.run(self._run())

    @property
    def has_lost_ray(self) -> bool:
        """Whether Ray has ended; the interpreter's exit would wait for it."""
        return self._has_lost_ray

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._end, self._drain_s)
        loop.add_signal_handler(signal.SIGINT, self._end, min(self._drain_s, _INTERRUPT_DRAIN_S))
        if self._authenticator.requires_keys:
            loop.add_signal_handler(signal.SIGHUP, self._authenticator.reload)
        elif self._options.host not in _LOOPBACKS:
            logger.warning(
                "Every client that can reach %s has access; set --api-keys to require a key.",
                self._options.host,
            )
        client = EngineClient(loop)
        tokenizer = Tokenizer.from_config(self._config)
        frontends = Frontends(
            client,
            tokenizer,
            self._config,
            self._options,
            authenticator=self._authenticator,
            certificates=self._certificates,
            tracer=self._tracer,
        )
        # Ports are bound before the model is loaded, so that a port in use fails at once.
        await frontends.start_servers()
        frontends.servicer.warm_up()
        try:
            return await self._run_engine(client, frontends)
        finally:
            await frontends.stop_servers(0.0)
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close)

    def _end(self, drain_s: float) -> None:
        """Begin to stop; a second signal ends the drain."""
        # Until Ray is connected, its handler for SIGTERM may come first and start this alarm, which
        # would abort the process (`kept_sigterm_handler`).
        signal.alarm(0)
        if self._stop.is_set():
            self._hurry.set()
        self._drain_s = drain_s
        self._stop.set()

    async def _run_engine(self, client: EngineClient, frontends: Frontends) -> int:
        try:
            engine = await self._engine_or_stop(client)
        except _StoppedError:
            return 0
        try:
            client.attach_engine(engine)
            guard_exit(engine, asyncio.get_running_loop())
            # Loaded objects live as long as the server; a collection that traverses them would
            # block the event loop for 70 ms.
            gc.collect()
            # A thread that reads a long text delays the event loop by a millisecond at a time.
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
            # Device memory of a closed rank is freed by the collector, so not until then.
            with freeze_heap():
                await frontends.set_ready()
                self._announce(frontends, engine)
                following = asyncio.create_task(self._follow_outage(engine))
                await self._until_stopped(engine)
                await self._drain(frontends)
                following.cancel()
        finally:
            await asyncio.to_thread(engine.close)
        return _OUTAGE_EXIT if self._has_lost_ray else 0

    async def _engine_or_stop(self, client: EngineClient) -> EngineLoop:
        """Return the engine. Raises _StoppedError if a signal stops the server meanwhile."""
        loading = asyncio.create_task(asyncio.to_thread(self._open_engine, client))
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not loading.done():
            await asyncio.wait((loading,), timeout=_LOADING_GRACE_S)
        if not loading.done():
            # Ray's start cannot be interrupted, and Python would wait for its thread. Most of Ray's
            # processes end with this process, but not its agents.
            if self._config.parallel.executor == "ray":
                from cluster.engine.ray_processes import kill_child_processes

                kill_child_processes()
            os._exit(0)
        return await loading

    def _open_engine(self, client: EngineClient) -> EngineLoop:
        with progress_reports(are_shown=True) as show:

            def report(what: str, fraction: float) -> None:
                # A running engine also reports the replacement of ranks, for which a drain waits.
                if self._stop.is_set() and not client.is_attached:
                    raise _StoppedError("The server was stopped while loading.")
                show(what, fraction)

            return open_engine(self._config, client, report)

    def _announce(self, frontends: Frontends, engine: EngineLoop) -> None:
        addresses = address_lines(
            self._config.model.name,
            self._options.host,
            http_port=frontends.http_port,
            grpc_port=frontends.grpc_port,
            has_tls=self._certificates is not None,
            allowed_hosts=(
                None if self._authenticator.requires_keys else self._options.allowed_hosts
            ),
        )
        try:
            print(*ready_lines(self._config, engine.stats()), *addresses, sep="\n", flush=True)
        except OSError as error:
            # For example, the disk of a log is full, which does not concern clients.
            logger.warning("Could not write to standard output: %s.", error.strerror)
            discard_output()

    async def _until_stopped(self, engine: EngineLoop) -> None:
        while not self._stop.is_set():
            if engine.error is not None and engine.outage is None:
                raise engine.error
            self._authenticator.reload_if_changed()
            try:
                await asyncio.wait_for(self._stop.wait(), _POLL_S)
            except TimeoutError:
                continue

    async def _follow_outage(self, engine: EngineLoop) -> None:
        """Stop the server, so that it is restarted, once ranks cannot be replaced anymore."""
        while (outage := engine.outage) is None or not outage.is_final:
            await asyncio.sleep(_POLL_S)
        logger.error("%s Dead ranks cannot be replaced, so the server stops.", outage.reason)
        self._has_lost_ray = True
        self._drain_s = min(self._drain_s, outage.drain_s)
        self._stop.set()
        # A drain that began before ends in time too.
        await asyncio.sleep(outage.drain_s)
        self._hurry.set()

    async def _drain(self, frontends: Frontends) -> None:
        """Let running requests finish, unless a second signal comes."""
        num_open_calls = frontends.servicer.num_open_calls
        if num_open_calls:
            logger.info(
                "Draining %s for up to %g s.", pluralize(num_open_calls, "call"), self._drain_s
            )
        draining = asyncio.create_task(frontends.stop_servers(self._drain_s))
        hurrying = asyncio.create_task(self._hurry.wait())
        await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        if not draining.done():
            draining.cancel()
            await asyncio.wait((draining,))
            await frontends.stop_servers(0.0)


class _StoppedError(StartupError):
    """A signal stopped the server before it was ready."""


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
        blocks_each = -(-config.max_model_len // block_size) + stats.state_blocks
        num_full = num_blocks // blocks_each
        most = min(num_full, stats.scheduler.max_num_seqs)
        dtype = config.cache.kv_cache_dtype
        yield (
            f"KV cache of {num_blocks * block_size} tokens in "
            f"{model.dtype if dtype == 'auto' else dtype}: "
            f"{pluralize(most, 'request')} of full length at once"
        )
    if stats.state_blocks:
        rows, num_bytes = stats.scheduler.max_num_seqs, stats.state_blocks * stats.block_bytes
        num_states = config.with_limits(StepLimits(max_num_seqs=rows)).num_states
        yield (
            f"Recurrent states of {pluralize(rows, 'sequence')} of {num_bytes / 2**20:.1f} MiB, "
            f"{num_states * num_bytes / 2**30:.1f} GiB in addition to the KV cache"
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


def guard_exit(
    engine: EngineLoop, loop: asyncio.AbstractEventLoop, *, limit_s: float = _LIMIT_S
) -> None:
    """Start a thread that ends the process if the loop hangs once the engine has ended.

    The process ends with exit code 1 after the loop has run nothing for `limit_s`.
    """
    threading.Thread(
        target=_guard, args=(engine, loop, limit_s), name="pagedray-exit-guard", daemon=True
    ).start()


def _guard(engine: EngineLoop, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
    while True:
        time.sleep(_GUARD_POLL_S)
        if engine.error is None:
            continue
        has_run = threading.Event()
        try:
            loop.call_soon_threadsafe(has_run.set)
        except RuntimeError:
            # It has been closed: the server has stopped.
            return
        if not has_run.wait(limit_s) and not loop.is_closed():
            logger.critical(
                "The engine has ended (%s), and the server does not respond. Exiting.", engine.error
            )
            os._exit(_EXIT_CODE)
