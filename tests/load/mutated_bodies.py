"""Mutated bodies over both frontends of a real server: `python -m tests.load.mutated_bodies`.

Each must get a response or a well-formed error. Afterwards the server must respond as before, with
no traceback in its log and no more memory in use.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import grpc

from tests.load.keep_alive import Answer, KeepAlive
from tests.load.measured_server import MeasuredServer, pin_load
from tests.load.report import Report, times_ms
from tests.load.request_bodies import json_bodies, protobuf_bodies
from tests.serving.grpc_frontend import status_of_call

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence

__all__ = ["Findings", "mutate_over_grpc", "mutate_over_http", "mutated_json", "mutated_protobuf"]

_HUGE_VARINTS = (
    b"\xff" * 9 + b"\x01",
    b"\xff" * 10,
    b"\x80" * 9 + b"\x01",
    b"\xff\xff\xff\xff\x0f",
)
_BAD_TEXTS = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x00", b"\xe2\x82")
# JSON texts, since some have no Python object.
_HOSTILE_VALUES = (
    *("null", "true", "0", "-1", "1e999", "-0.0", "1e-400", "NaN", "-Infinity", "0.1"),
    *("9" * 400, "-" + "9" * 30, "2147483648", "-2147483649", "9223372036854775808"),
    *('""', '"x"', '"\\ud800"', '"\\u0000"', '"' + "x" * 5000 + '"', '"\u200b"'),
    *("[]", "{}", "[null]", "[[]]", '[""]', "[1e999]", '{"":1}', '{"a":{"a":{}}}'),
    "[" * 200 + "]" * 200,
    "[" * 5000,
    '{"a":' * 300 + "1" + "}" * 300,
    "[" + "0," * 3000 + "0]",
    '["a",' * 100 + "1" + "]" * 100,
)
_MARK = "\ue000"
_MAX_NESTED_BYTES = 60_000


def mutated_protobuf(bodies: Sequence[bytes], generator: random.Random) -> bytes:
    """Return a mutation of one of these messages."""
    body = generator.choice(bodies)
    for _ in range(generator.randint(1, 3)):
        body = (
            _mutate_bytes(body, bodies, generator)
            if generator.random() < 0.5
            else _mutate_fields(body, bodies, generator)
        )
    return body


def mutated_json(bodies: Sequence[dict[str, Any]], generator: random.Random) -> bytes:  # Any: JSON
    """Return a mutation of one of these bodies."""
    if generator.random() < 0.35:
        written = [json.dumps(body, ensure_ascii=False).encode() for body in bodies]
        body = generator.choice(written)
        for _ in range(generator.randint(1, 3)):
            body = _mutate_bytes(body, written, generator)
        return body
    parsed = copy.deepcopy(generator.choice(bodies))
    hostile: list[str] = []
    for _ in range(generator.randint(1, 3)):
        _mutate_value(parsed, bodies, hostile, generator)
    text = json.dumps(parsed, ensure_ascii=False)
    for value in hostile:
        text = text.replace(f'"{_MARK}"', value, 1)
    if generator.random() < 0.05:
        # Two members of the same name.
        text = '{"model":"tiny-llama",' + text[1:]
    return text.encode("utf-8", "surrogatepass")


def _mutate_bytes(body: bytes, others: Sequence[bytes], generator: random.Random) -> bytes:
    content = bytearray(body)
    place = generator.randrange(len(content) + 1)
    match generator.randrange(9):
        case 0 if place < len(content):
            content[place] ^= 1 << generator.randrange(8)
        case 1 if place < len(content):
            content[place] = generator.choice((0, 1, 0x7F, 0x80, 0xFF))
        case 2:
            del content[place : place + generator.randint(1, 8)]
        case 3:
            del content[place:]
        case 4:
            content[place:place] = content[place : place + generator.randint(1, 64)]
        case 5:
            content[place:place] = generator.randbytes(generator.randint(1, 16))
        case 6:
            other = generator.choice(others)
            content[place:] = other[generator.randrange(len(other) + 1) :]
        case 7:
            content[place:place] = generator.choice(_BAD_TEXTS)
        case _:
            start = generator.randrange(len(content) + 1)
            content[place:place] = content[min(start, place) : max(start, place)]
    return bytes(content)


def _mutate_fields(body: bytes, others: Sequence[bytes], generator: random.Random) -> bytes:
    fields = list(_fields(body))
    if not fields:
        return generator.choice(others)
    index = generator.randrange(len(fields))
    tag, content = fields[index]
    match generator.randrange(9):
        case 0:
            fields[index:index] = [fields[index]] * generator.choice((1, 2, 50))
        case 1:
            del fields[index]
        case 2:
            fields += list(_fields(generator.choice(others)))
        case 3:
            generator.shuffle(fields)
        case 4:
            # Another wire type.
            fields[index] = (tag & ~7 | generator.randrange(8), content)
        case 5:
            # Another field.
            fields[index] = (
                generator.choice((1, 2, 3, 4, 7, 15, 99, 2**28)) << 3 | tag & 7,
                content,
            )
        case 6 if tag & 7 == 0:
            fields[index] = (tag, generator.choice(_HUGE_VARINTS))
        case 7 if tag & 7 == 2:
            fields[index] = (tag, _nested(tag, content, generator))
        case _ if tag & 7 == 2:
            # Its content may be a message, a text or a list of numbers.
            inner = content[len(content) - _length(content) :]
            mutate = _mutate_fields if generator.random() < 0.7 else _mutate_bytes
            inner = mutate(inner, [inner], generator)
            fields[index] = (tag, _varint(len(inner)) + inner)
        case _:
            fields[index] = (tag, generator.choice(_HUGE_VARINTS))
    return b"".join(_varint(tag) + content for tag, content in fields)


def _nested(tag: int, content: bytes, generator: random.Random) -> bytes:
    inner = content
    for _ in range(generator.choice((2, 20, 99, 101, 300))):
        inner = _varint(tag) + inner
        inner = _varint(len(inner)) + inner
        if len(inner) > _MAX_NESTED_BYTES:
            break
    return inner


def _fields(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the tag and the content of each field, as far as they can be parsed."""
    place = 0
    while place < len(body):
        tag, start = _read_varint(body, place)
        kind, end = tag & 7, start
        if kind == 0:
            _, end = _read_varint(body, start)
        elif kind == 1:
            end = start + 8
        elif kind == 2:
            size, end = _read_varint(body, start)
            end += size
        elif kind == 5:
            end = start + 4
        end = min(end, len(body))
        yield tag, body[start:end]
        place = end


def _length(content: bytes) -> int:
    """Return how many bytes follow the length prefix of a field's content."""
    _, start = _read_varint(content, 0)
    return len(content) - start


def _read_varint(body: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(body):
        byte = body[place]
        place += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value, place


def _varint(value: int) -> bytes:
    content = bytearray()
    while value >= 0x80:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    content.append(value)
    return bytes(content)


# Any: JSON.
def _mutate_value(
    parsed: dict[str, Any],
    others: Sequence[dict[str, Any]],
    hostile: list[str],
    generator: random.Random,
) -> None:
    places = list(_places(parsed))
    if not places:
        parsed.update(copy.deepcopy(generator.choice(others)))
        return
    holder, key = generator.choice(places)
    match generator.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[generator.choice(("x", "", "n", "tools", "stream", "\u00e9", "a" * 200))] = (
                holder[key]
            )
        case 2:
            # A value from another place in a valid body of the endpoint.
            there, name = generator.choice(list(_places(generator.choice(others))))
            holder[key] = copy.deepcopy(there[name])
        case 3 if isinstance(holder, list):
            holder[key:key] = [holder[key]] * generator.choice((1, 17, 200))
        case _:
            hostile.append(generator.choice(_HOSTILE_VALUES))
            holder[key] = _MARK


# Any: lists and objects are written to by index and by name.
def _places(value: object) -> Iterator[tuple[Any, Any]]:
    """Yield every list and object inside a value with each of its indices or names."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield value, name
            yield from _places(inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield value, index
            yield from _places(inner)


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
