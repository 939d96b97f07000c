"""`pagedray run-batch`: the requests of a file, in the batch format of OpenAI, without a server.

Each request is a call of the HTTP API within this process, so that it has the same parameters,
results and errors as with a server.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from typing import TYPE_CHECKING, TextIO

import msgspec
from tqdm import tqdm

from cluster.engine.open_engine import open_engine
from cluster.engine.progress import progress_reports
from cluster.serving.engine_client import EngineClient
from cluster.serving.http_app import build_http_app
from cluster.serving.servicer import Servicer
from cluster.serving.telemetry.log_lines import logging_to
from cluster.serving.text.tokenizer import Tokenizer
from pagedray.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import NoReturn

    from starlette.types import Message

    from cluster.serving.http.app import HttpApp
    from cluster.serving.inputs import CallOptions
    from pagedray.config import EngineConfig

__all__ = ["read_batch", "run_batch"]

_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/pooling",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/v1/score",
)
_NUM_AT_ONCE = 1024
"""Number of requests in the engine, which orders and batches them."""
_RETRY_S = 0.2
_OVERLOADED = (429, 503)
_MAX_TRIES = 3000


class BatchLine(msgspec.Struct):
    """A request of a batch."""

    custom_id: str
    url: str
    body: dict[str, object]
    method: str = "POST"


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Result(msgspec.Struct):
    """A line of the output."""

    id: str
    custom_id: str
    response: _Response
    error: msgspec.Raw | None


class _ErrorBody(msgspec.Struct):
    error: msgspec.Raw


def read_batch(path: Path) -> list[BatchLine]:
    """Return the requests of a file. Raises StartupError, which names the line of a mistake."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise StartupError(f"Cannot read --input-file {path}: {error.strerror}.") from error
    lines: list[BatchLine] = []
    ids: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            found = msgspec.json.decode(line, type=BatchLine)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StartupError(f"{place}: {error}.") from error
        if found.method != "POST":
            raise StartupError(f"{place}: method must be POST, not {found.method!r:.80}.")
        if found.url not in _PATHS:
            raise StartupError(
                f"{place}: url must be one of {', '.join(_PATHS)}, not {found.url!r:.80}."
            )
        if found.body.get("stream"):
            raise StartupError(f"{place}: body.stream must be false, since results are a file.")
        if found.custom_id in ids:
            raise StartupError(
                f"{place}: custom_id {found.custom_id!r:.80} is also that of line "
                f"{ids[found.custom_id]}."
            )
        ids[found.custom_id] = number
        lines.append(found)
    if not lines:
        raise StartupError(f"{path} has no requests.")
    return lines


def run_batch(
    config: EngineConfig, options: CallOptions, lines: Sequence[BatchLine], output: Path
) -> int:
    """Write the results of a batch to a file, in the order of the requests.

    Raises PagedRayError. Results are written once all results before them are, so that an
    interrupted batch has a beginning.
    """
    try:
        file = output.open("w", encoding="utf-8")
    except OSError as error:
        raise StartupError(f"Cannot write --output-file {output}: {error.strerror}.") from error
    with file, logging_to(form="text", level="warning"):
        num_failed = asyncio.run(_run(config, options, lines, file))
    failed = f", of which {num_failed} failed" if num_failed else ""
    print(f"Wrote {len(lines)} results to {output}{failed}.", file=sys.stderr)
    return 0


async def _run(
    config: EngineConfig, options: CallOptions, lines: Sequence[BatchLine], file: TextIO
) -> int:
    """Write the results; return how many are errors."""
    client = EngineClient(asyncio.get_running_loop())
    servicer = Servicer(client, Tokenizer.from_config(config), config, options)
    try:
        with progress_reports(are_shown=True) as report:
            engine = await asyncio.to_thread(open_engine, config, client, report)
        try:
            client.attach_engine(engine)
            servicer.set_ready()
            with tqdm(total=len(lines), unit="request", disable=None) as bar:
                batch = _Batch(build_http_app(servicer), client, lines, file, bar)
                await batch.run()
        finally:
            servicer.stop_accepting()
            await asyncio.to_thread(engine.close)
    finally:
        await servicer.close()
    return batch.num_failed


class _Batch:
    """Some requests; their results are written in their order."""

    def __init__(
        self,
        app: HttpApp,
        client: EngineClient,
        lines: Sequence[BatchLine],
        file: TextIO,
        bar: tqdm[NoReturn],
    ) -> None:
        self._app = app
        self._client = client
        self._remaining = iter(enumerate(lines))
        self._file = file
        self._bar = bar
        self._results: dict[int, bytes] = {}
        """Results that wait for earlier results, by their numbers."""
        self._num_written = 0
        self.num_failed = 0
        """Number of results that are errors."""

    async def run(self) -> None:
        """Write all results."""
        workers = [asyncio.create_task(self._work()) for _ in range(_NUM_AT_ONCE)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()

    async def _work(self) -> None:
        for index, line in self._remaining:
            status, body = await self._answer(line)
            error = None
            if status >= 400:
                self.num_failed += 1
                error = msgspec.json.decode(body, type=_ErrorBody).error
            request_id = uuid.uuid4().hex
            result = _Result(
                id=f"batch_req_{request_id}",
                custom_id=line.custom_id,
                response=_Response(status, request_id, msgspec.Raw(body)),
                error=error,
            )
            self._results[index] = msgspec.json.encode(result)
            self._write()

    def _write(self) -> None:
        while (result := self._results.pop(self._num_written, None)) is not None:
            self._file.write(result.decode() + "\n")
            self._num_written += 1
            self._bar.update()
        self._file.flush()

    async def _answer(self, line: BatchLine) -> tuple[int, bytes]:
        body = msgspec.json.encode(line.body)
        for _ in range(_MAX_TRIES):
            status, answer = await _call(self._app, line.url, body)
            if status not in _OVERLOADED:
                break
            if (error := self._client.engine.error) is not None:
                raise error
            # The queue is full.
            await asyncio.sleep(_RETRY_S)
        return status, answer


async def _call(app: HttpApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Return the status and the body of the response to a POST request."""
    received: Iterator[Message] = iter([{"type": "http.request", "body": body}])
    sent: list[Message] = []

    async def receive() -> Message:
        message = next(received, None)
        # The client stays connected.
        return await asyncio.Future() if message is None else message

    async def send(message: Message) -> None:
        sent.append(message)

    headers = {"host": "localhost", "content-type": "application/json"}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
    }
    await app(scope, receive, send)
    status = next(one["status"] for one in sent if one["type"] == "http.response.start")
    return status, b"".join(one.get("body", b"") for one in sent)
