"""The frontends of one replica over an engine that only publishes tokens, pinned to one core.

    python -m bench.frontend_server --core 0 --counter FILE

It prints its addresses to stdout as a line of JSON, and answers each line of JSON on stdin with the
CPU time used so far. `bench.frontends` drives it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.frontends.token_counter import TokenCounter
from cluster.engine.stats import EngineStats
from cluster.scheduling.event import TokenEvent
from cluster.scheduling.stats import SchedulerStats
from cluster.serving.engine_client import EngineClient
from cluster.serving.frontend_options import FrontendOptions
from cluster.serving.frontends import Frontends
from cluster.serving.text.tokenizer import Tokenizer
from pagedray.config import EngineConfig, KernelReport
from pagedray.model_config import ModelConfig

if TYPE_CHECKING:
    from pagedray.errors import EngineError
    from pagedray.request import Request

MODEL = Path(__file__).resolve().parent.parent / "examples" / "tiny-llama"
TOKEN = 351
TOKEN_TEXT = b" return"
"""It occurs nowhere else in a response; hexadecimal digits could be part of an id."""
MODEL_NAME = "none"
CONTEXT = 10_000_000
_POLL_S = 0.0002


class PacedEngine:
    """Publishes one token of every request per step, and no more than clients can read.

    A step runs when it is due and fewer than `lead` published tokens per request are unread. Its
    thread does nothing else.
    """

    def __init__(self, client: EngineClient, counter: TokenCounter) -> None:
        self._client = client
        self._counter = counter
        self._lock = threading.Lock()
        self._requests: dict[str, Request] = {}
        self._step_s = 0.0
        self._lead = 1
        self._num_published = 0
        self._num_steps = 0
        self._cpu_s = 0.0
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run)

    @property
    def is_healthy(self) -> bool:
        return True

    @property
    def error(self) -> EngineError | None:
        return None

    @property
    def cpu_s(self) -> float:
        """CPU time of the thread."""
        return self._cpu_s

    def set_pace(self, *, step_s: float, lead: int) -> None:
        """Run a step every `step_s` seconds, and forget the tokens of earlier requests."""
        with self._lock:
            assert not self._requests
            self._step_s, self._lead = step_s, lead
            self._num_published = self._counter.value

    def check_room(self, tenant: str, num_tokens: int) -> None:
        """Accept every request."""

    def submit_request(self, request: Request) -> None:
        """Publish tokens of the request from the next step on."""
        with self._lock:
            self._requests[request.id] = request

    def abort_request(self, request_id: str) -> None:
        """Publish no more tokens of the request."""
        with self._lock:
            self._requests.pop(request_id, None)

    def finish_sequence(self, request_id: str, index: int) -> None:
        """Publish no more tokens of the request, which has one sequence."""
        self.abort_request(request_id)

    def stats(self) -> EngineStats:
        """Return the current counts."""
        with self._lock:
            num_running = len(self._requests)
        scheduler = SchedulerStats(
            num_running=num_running,
            num_waiting=0,
            num_queued_requests=0,
            num_scheduled_tokens=0,
            num_steps=0,
        )
        return EngineStats(
            scheduler=scheduler,
            num_steps=self._num_steps,
            last_step_s=self._step_s,
            num_prompt_tokens=0,
            num_generated_tokens=self._num_published,
            block_bytes=0,
            kernels=KernelReport("none", {}),
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join()

    def _run(self) -> None:
        next_s = time.monotonic()
        while not self._is_stopping:
            now_s = time.monotonic()
            if now_s < next_s:
                time.sleep(next_s - now_s)
            elif self.run_step():
                # A late step is not made up for, as on a rank.
                next_s = max(next_s + self._step_s, now_s)
            else:
                time.sleep(_POLL_S)
            self._cpu_s = time.thread_time()

    def run_step(self) -> bool:
        """Publish a token of each request, unless too many are unread."""
        with self._lock:
            num_unread = self._num_published - self._counter.value
            if not self._requests or num_unread > (self._lead - 1) * len(self._requests):
                return False
            events = [
                TokenEvent(request_id, 0, (TOKEN,), num_prompt_tokens=1, started_s=1.0)
                for request_id in self._requests
            ]
            self._num_published += len(events)
            self._num_steps += 1
        self._client.publish(events)
        return True


def _config() -> EngineConfig:
    model = ModelConfig(
        name=MODEL_NAME,
        folder=MODEL,
        architecture="none",
        vocab_size=3072,
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=64,
        max_positions=CONTEXT,
    )
    return EngineConfig(model=model)


async def start_frontends(counter: TokenCounter) -> tuple[Frontends, PacedEngine]:
    """Return ready frontends, and their engine, which has not started."""
    client = EngineClient(asyncio.get_running_loop())
    engine = PacedEngine(client, counter)
    client.attach_engine(engine)  # type: ignore[arg-type]  # a part of it
    tokenizer = Tokenizer.from_folder(MODEL)
    options = FrontendOptions(host="127.0.0.1", grpc_port=0, http_port=0)
    frontends = Frontends(client, tokenizer, _config(), options)
    await frontends.start_servers()
    await frontends.set_ready()
    return frontends, engine


async def _serve(counter: TokenCounter) -> None:
    loop = asyncio.get_running_loop()
    frontends, engine = await start_frontends(counter)
    engine.start()
    _say({"grpc_port": frontends.grpc_port, "http_port": frontends.http_port})
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        while line := await reader.readline():
            asked = json.loads(line)
            if asked:
                # The server may not have noticed yet that earlier clients have left.
                while engine.stats().scheduler.num_running:
                    await asyncio.sleep(0.01)
                engine.set_pace(**asked)
            _say({"cpu_s": time.process_time(), "engine_cpu_s": engine.cpu_s})
    finally:
        engine.stop()
        await frontends.stop_servers(0.0)


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


def main() -> int:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", type=int, required=True)
    parser.add_argument("--counter", type=Path, required=True)
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    asyncio.run(_serve(TokenCounter(options.counter)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
