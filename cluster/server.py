"""`pagedray serve`: an engine behind its fronts, until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import TYPE_CHECKING

from cluster.controller import Controller
from cluster.executor import Executor, make_executor
from cluster.progress import ProgressLine
from cluster.serving.engine_client import EngineClient
from cluster.serving.fronts import Fronts
from cluster.serving.tokenizer import Tokenizer
from pagedray.errors import StartupError

if TYPE_CHECKING:
    from pagedray.config import EngineConfig

__all__ = ["Server"]

logger = logging.getLogger(__name__)

_GRACE_S = 2.0
_LOADING_GRACE_S = 2.5
_HEALTH_POLL_S = 0.5


class Server:
    """One replica with its fronts in this process."""

    def __init__(self, config: EngineConfig, *, host: str, grpc_port: int, http_port: int) -> None:
        self._config = config
        self._host = host
        self._grpc_port = grpc_port
        self._http_port = http_port
        self._stop = asyncio.Event()

    def run(self) -> int:
        """Serve until SIGINT or SIGTERM; return the exit code. Raises StartupError."""
        if self._config.model.is_encoder:
            raise StartupError(
                f"{self._config.model.name} is an encoder, which generates nothing to serve; "
                "`pagedray.LLM(...).embed` runs it."
            )
        return asyncio.run(self._run())

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        client = EngineClient(loop)
        tokenizer = Tokenizer.from_folder(self._config.model.folder)
        fronts = Fronts(
            client,
            tokenizer,
            self._config,
            host=self._host,
            grpc_port=self._grpc_port,
            http_port=self._http_port,
        )
        # The ports are taken first: a busy one is told before a model is loaded.
        await fronts.start()
        try:
            return await self._run_engine(client, fronts)
        finally:
            await fronts.stop(0.0)

    async def _run_engine(self, client: EngineClient, fronts: Fronts) -> int:
        try:
            executor = await self._executor_or_stop()
        except _StoppedError:
            return 0
        controller = Controller(self._config, executor, client)
        try:
            controller.start()
            client.attach(controller)
            await fronts.set_ready()
            self._announce(fronts)
            await self._until_stopped(controller)
            await fronts.stop(_GRACE_S)
        finally:
            await asyncio.to_thread(_close, controller, executor)
        return 0

    async def _executor_or_stop(self) -> Executor:
        """Return the executor. Raises _StoppedError if the user ends the server meanwhile."""
        loading = asyncio.create_task(asyncio.to_thread(self._make_executor))
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not loading.done():
            await asyncio.wait((loading,), timeout=_LOADING_GRACE_S)
        if not loading.done():
            # Ray's start cannot be interrupted, and Python would wait for the thread that is in
            # it. What Ray has started so far ends with this process.
            os._exit(0)
        return await loading

    def _make_executor(self) -> Executor:
        line = ProgressLine()

        def report(what: str, fraction: float) -> None:
            if self._stop.is_set():
                raise _StoppedError("The server was stopped.")
            line.report(what, fraction)

        try:
            return make_executor(self._config, report)
        finally:
            line.close()

    def _announce(self, fronts: Fronts) -> None:
        model = self._config.model
        print(
            f"Ready: {model.name} at http://{self._host}:{fronts.http_port}/v1 "
            f"and grpc://{self._host}:{fronts.grpc_port}. Ctrl-C ends it.",
            flush=True,
        )

    async def _until_stopped(self, controller: Controller) -> None:
        while not self._stop.is_set():
            if controller.error is not None:
                raise controller.error
            try:
                await asyncio.wait_for(self._stop.wait(), _HEALTH_POLL_S)
            except TimeoutError:
                continue


class _StoppedError(StartupError):
    """The user ended the server before it was ready."""


def _close(controller: Controller, executor: Executor) -> None:
    controller.stop()
    executor.close()
