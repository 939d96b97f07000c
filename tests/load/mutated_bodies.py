"""Mutated bodies over both frontends of a real server: `python -m tests.load.mutated_bodies`.

Each must get a response or a well-formed error. Afterwards the server must respond as before, with
no traceback in its log and no more memory in use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time
from collections import Counter
from typing import TYPE_CHECKING

import grpc

from tests.load.body_mutator import mutated_json, mutated_protobuf
from tests.load.keep_alive import Answer, KeepAlive
from tests.load.measured_server import MeasuredServer, pin_load
from tests.load.report import Report, times_ms
from tests.load.request_bodies import json_bodies, protobuf_bodies
from tests.serving.grpc_frontend import status_of_call

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

__all__ = ["SERVER_ARGUMENTS", "Findings", "mutate_over_grpc", "mutate_over_http"]

SERVER_ARGUMENTS = ("--max-model-len=128", "--num-blocks=512", "--log-level=warning")
"""A short context, since a mutated body may ask for a long generation."""

_MODEL = "tiny-llama"
_HTTP_STATUSES = {200, 400, 403, 404, 413, 415}
_GRPC_CODES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    # A body may ask for a deadline, for a priority that needs a key, and for the id of another.
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.PERMISSION_DENIED,
}
_EVENT_ENDS = {
    "/v1/responses": (b"event: response.completed", b"event: response.incomplete"),
    "/v1/messages": (b"event: message_stop",),
}
"""What the last event of a stream may be, in APIs other than OpenAI's older ones."""
_MESSAGES_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
_CONNECTIONS = 4
_TIMEOUT_S = 30.0
_MOST_REJECTION_BYTES = 2000
# Each structure starts a process, so there are only a few.
_STRUCTURED_PART = 0.04
_NUMBERS = re.compile(r"\d+")
_MOST_SHOWN = 20


class Findings:
    """The responses of one frontend."""

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.slowest: tuple[float, str, bytes] = (0.0, "", b"")
        self.faults: list[str] = []
        """Unexpected responses, with the body."""
        self.rejections: Counter[str] = Counter()
        """Error messages without numbers."""

    def add(self, kind: str, body: bytes, status: str, seconds: float) -> None:
        """Add a response."""
        self.statuses[status] += 1
        self.seconds.append(seconds)
        self.slowest = max(self.slowest, (seconds, kind, body[:400]))

    def add_fault(self, kind: str, body: bytes, what: str) -> None:
        """Add a response that no body may get."""
        self.faults.append(f"{what}, for {kind}: {body[:400]!r}")

    def add_rejection(self, text: str) -> None:
        """Add an error message."""
        self.rejections[_NUMBERS.sub("0", text)[:60]] += 1

    def figures(self) -> dict[str, object]:
        """Return the figures of the report."""
        seconds, kind, body = self.slowest
        return {
            "bodies": sum(self.statuses.values()),
            "statuses": dict(self.statuses.most_common()),
            "kinds_of_refusals": len(self.rejections),
            "faults": len(self.faults),
            "first_faults": self.faults[:_MOST_SHOWN],
            "times": times_ms(self.seconds),
            "slowest": {"ms": round(seconds * 1e3, 1), "kind": kind, "body": repr(body)},
        }


async def mutate_over_http(
    port: int, num_bodies: int, *, model: str = _MODEL, seed: int = 0
) -> Findings:
    """Send mutated JSON to every endpoint that takes a body."""
    found = Findings()
    generator = random.Random(f"http {seed}")
    good = json_bodies(model)
    bodies = (
        (kind, mutated_json(good[kind], generator))
        for kind in _kinds(list(good), num_bodies, generator)
    )
    connections: list[KeepAlive] = []

    def sender() -> Callable[[str, bytes], Coroutine[None, None, None]]:
        connection = KeepAlive(port)
        connections.append(connection)

        async def send(kind: str, body: bytes) -> None:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    answer = await connection.post(kind.partition(" ")[0], body)
            except (OSError, EOFError, TimeoutError) as error:
                connection.close()
                found.add(kind, body, type(error).__name__, _TIMEOUT_S)
                found.add_fault(kind, body, f"no answer ({error!r})")
                return
            found.add(kind, body, str(answer.status), answer.seconds)
            _check_http(found, kind, body, answer)

        return send

    await _send_all(bodies, sender)
    for connection in connections:
        connection.close()
    return found


async def mutate_over_grpc(
    target: str, num_bodies: int, *, model: str = _MODEL, seed: int = 0
) -> Findings:
    """Send mutated protobuf to every method."""
    found = Findings()
    generator = random.Random(f"grpc {seed}")
    good = protobuf_bodies(model)
    bodies = (
        (kind, mutated_protobuf(good[kind], generator))
        for kind in _kinds(list(good), num_bodies, generator)
    )
    async with grpc.aio.insecure_channel(target) as channel:

        async def send(kind: str, body: bytes) -> None:
            method = kind.partition(" ")[0]
            call = channel.unary_stream(f"/pagedray.v1.GenerationService/{method}")(  # type: ignore[call-arg]  # grpc-stubs asks for what has a default
                body, timeout=_TIMEOUT_S
            )
            started_s = time.perf_counter()
            code, text = grpc.StatusCode.OK, ""
            try:
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError as error:
                code, text = error.code(), error.details() or ""
                _check_grpc(found, kind, body, error)
            found.add(kind, body, code.name, time.perf_counter() - started_s)
            if code not in _GRPC_CODES:
                found.add_fault(kind, body, f"{code.name} ({text})")

        await _send_all(bodies, lambda: send)
    return found


async def _send_all(
    bodies: Iterable[tuple[str, bytes]],
    sender: Callable[[], Callable[[str, bytes], Coroutine[None, None, None]]],
) -> None:
    """Send each body once, with one sender for each connection."""
    waiting = iter(bodies)

    async def work() -> None:
        send = sender()
        for kind, body in waiting:
            await send(kind, body)

    await asyncio.gather(*(work() for _ in range(_CONNECTIONS)))


def _kinds(kinds: list[str], number: int, generator: random.Random) -> list[str]:
    weights = [_STRUCTURED_PART if "structure" in kind else 1.0 for kind in kinds]
    return generator.choices(kinds, weights, k=number)


def _check_http(found: Findings, kind: str, body: bytes, answer: Answer) -> None:
    if answer.status not in _HTTP_STATUSES:
        found.add_fault(kind, body, f"{answer.status} ({answer.body[:200]!r})")
        return
    content_type = answer.headers.get("content-type", "")
    if answer.status == 200:
        if content_type.startswith("text/event-stream"):
            mark = b"event: " if kind in _EVENT_ENDS else b"data: "
            last = answer.body[answer.body.rfind(mark) :]
            if not last.startswith(_EVENT_ENDS.get(kind, (b"data: [DONE]",))):
                found.add_fault(kind, body, "a stream without an end")
        elif not isinstance(json.loads(answer.body), dict):
            found.add_fault(kind, body, "an answer that is no object")
        return
    error = json.loads(answer.body)["error"]
    fields = {"message", "type"}
    if kind not in _MESSAGES_PATHS:
        fields |= {"param", "code"}
    is_good = (
        content_type == "application/json"
        and set(error) == fields
        and isinstance(error["message"], str)
        and "Traceback" not in error["message"]
        and len(answer.body) < _MOST_REJECTION_BYTES
    )
    if not is_good:
        found.add_fault(kind, body, f"{answer.status} in bad form ({answer.body[:200]!r})")
    found.add_rejection(error["message"])


def _check_grpc(found: Findings, kind: str, body: bytes, error: grpc.aio.AioRpcError) -> None:
    text = error.details() or ""
    found.add_rejection(text)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        # The client's own deadline has no details.
        return
    status = status_of_call(error)
    is_good = status.message == text and len(status.details) >= 1 and "Traceback" not in text
    if not is_good or len(text) >= _MOST_REJECTION_BYTES:
        found.add_fault(kind, body, f"{error.code().name} in bad form ({text[:200]})")


def main() -> None:
    """Send them all, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=50_000, help="to each frontend (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    Report.add_argument(parser)
    options = parser.parse_args()
    report = Report("tests.load.mutated_bodies")
    pin_load()
    with MeasuredServer(*SERVER_ARGUMENTS) as server:
        report.add("server", server.command)
        # Memory that is allocated once is not a leak.
        asyncio.run(mutate_over_http(server.http_port, 1000, seed=-1))
        asyncio.run(mutate_over_grpc(server.grpc_target, 1000, seed=-1))
        rss_mib = [server.rss_mib()]
        report.add("json", asyncio.run(
            mutate_over_http(server.http_port, options.bodies, seed=options.seed)
        ).figures())  # fmt: skip
        rss_mib.append(server.rss_mib())
        report.add("protobuf", asyncio.run(
            mutate_over_grpc(server.grpc_target, options.bodies, seed=options.seed)
        ).figures())  # fmt: skip
        rss_mib.append(server.rss_mib())
        report.add("answers_good_requests_afterwards", server.answers())
        report.add("errors_in_log", server.logged_errors())
        report.add("log_lines", len(server.log().splitlines()))
        report.add("rss_mib", {
            "after_1000_of_each": round(rss_mib[0]),
            "after_json": round(rss_mib[1]),
            "after_protobuf": round(rss_mib[2]),
        })  # fmt: skip
    report.write(options.output)


if __name__ == "__main__":
    main()
