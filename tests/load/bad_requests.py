"""How fast an idle server rejects bad requests: `python -m tests.load.bad_requests`.

Each request is sent repeatedly over both frontends, and must be rejected with the expected status
and a well-formed error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from tests.load.bad_request_cases import GRPC_CASES, HTTP_CASES, STRUCTURES
from tests.load.keep_alive import KeepAlive
from tests.load.measured_server import MeasuredServer, pin_load
from tests.load.report import Report, times_ms
from tests.load.tenant_keys import write_keys
from tests.serving.grpc_frontend import status_of_call

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.load.bad_request_cases import GrpcCase

__all__ = ["reject_over_grpc", "reject_over_http"]

_TARGET_S = 0.05


class Rejections:
    """The responses to all cases."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, object]] = {}
        self.seconds: list[float] = []
        self.structure_seconds: list[float] = []
        self.wrong: list[str] = []
        """The cases with an unexpected status or a malformed error."""
        self.accepted: list[str] = []
        """Structures that were compiled and served."""

    def add(
        self, name: str, status: object, text: str, seconds: list[float], *, is_right: bool
    ) -> None:
        """Add the responses to a case, which were all the same."""
        self.rows[name] = {"status": status, "text": text[:100]} | times_ms(seconds)
        if status in (200, "OK"):
            self.accepted.append(name)
            return
        (self.structure_seconds if name in STRUCTURES else self.seconds).extend(seconds)
        if not is_right:
            self.wrong.append(f"{name}: {status} {text[:200]}")

    def figures(self) -> dict[str, object]:
        """Return the figures of the report."""
        slow = {
            name: row["max_ms"]
            for name, row in self.rows.items()
            if float(str(row["max_ms"])) > _TARGET_S * 1e3 and name not in self.accepted
        }
        return {
            "cases": len(self.rows),
            "wrong": self.wrong,
            "served": self.accepted,
            "refusals": times_ms(self.seconds),
            "refusals_of_structures": times_ms(self.structure_seconds),
            "over_50_ms": slow,
            "rows": self.rows,
        }


async def reject_over_http(
    port: int, keys: dict[str, str], *, repeats: int, cases: Iterable[str] = tuple(HTTP_CASES)
) -> Rejections:
    """Send each case `repeats` times over HTTP."""
    found = Rejections()
    for name in cases:
        case = HTTP_CASES[name]
        headers = {} if case.key is None else {"authorization": f"Bearer {keys[case.key]}"}
        connection = KeepAlive(port, headers=headers)
        seconds = []
        for _ in range(repeats):
            await connection.connect()
            answer = await connection.post(
                case.path, case.body, content_type=case.content_type, more=case.more
            )
            seconds.append(answer.seconds)
        connection.close()
        parsed = json.loads(answer.body)
        error = parsed.get("error", {})
        is_right = answer.status == case.status and _has_shape(parsed, case.path)
        found.add(name, answer.status, error.get("message", ""), seconds, is_right=is_right)
    return found


async def reject_over_grpc(
    target: str, keys: dict[str, str], *, repeats: int, cases: Iterable[str] = tuple(GRPC_CASES)
) -> Rejections:
    """Send each case `repeats` times over gRPC."""
    found = Rejections()
    async with grpc.aio.insecure_channel(target) as channel:
        for name in cases:
            case = GRPC_CASES[name]
            key = None if case.key is None else keys.get(case.key, "pr-unknown")
            seconds = []
            for _ in range(repeats):
                started_s = time.perf_counter()
                code, text, has_details = await _grpc_status(channel, case, key)
                seconds.append(time.perf_counter() - started_s)
            is_right = code is case.code and (has_details or code in _BY_GRPC_ITSELF)
            found.add(name, code.name, text, seconds, is_right=is_right)
    return found


async def _grpc_status(
    channel: grpc.aio.Channel, case: GrpcCase, key: str | None
) -> tuple[grpc.StatusCode, str, bool]:
    """Return the status of a call, its message, and whether it has the details of its error."""
    who = () if key is None else (("authorization", f"Bearer {key}"),)
    method = channel.unary_stream(f"/pagedray.v1.GenerationService/{case.method}")  # type: ignore[call-arg]  # grpc-stubs asks for what has a default
    metadata = (*who, *case.more)
    try:
        async for _ in method(
            case.body, timeout=case.timeout_s, metadata=metadata, compression=case.compression
        ):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or "", _has_details(error)
    return grpc.StatusCode.OK, "", True


def _has_shape(parsed: dict[str, Any], path: str) -> bool:  # Any: JSON
    """Return whether an error has the shape of the API that a path belongs to."""
    error = set(parsed.get("error", ()))
    if path.startswith("/v1/messages"):
        return parsed.get("type") == "error" and error == {"message", "type"}
    return error == {"message", "type", "param", "code"}


# Decided before our methods run: by the client's own clock, or by gRPC's server.
_BY_GRPC_ITSELF = (
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


def _has_details(error: grpc.aio.AioRpcError) -> bool:
    if error.code() in _BY_GRPC_ITSELF:
        return False
    return len(status_of_call(error).details) >= 1


def main() -> None:
    """Send all cases, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20, help="of each case (%(default)s)")
    Report.add_argument(parser)
    options = parser.parse_args()
    report = Report("tests.load.bad_requests")
    pin_load()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.toml"
        keys = write_keys(path, "ann")
        with MeasuredServer(f"--api-keys={path}", "--log-level=warning") as server:
            report.add("server", server.command)
            # The first structure loads modules, which is not measured.
            asyncio.run(
                reject_over_http(server.http_port, keys, repeats=1, cases=["regex that is none"])
            )
            report.add("http", asyncio.run(
                reject_over_http(server.http_port, keys, repeats=options.repeats)
            ).figures())  # fmt: skip
            report.add("grpc", asyncio.run(
                reject_over_grpc(server.grpc_target, keys, repeats=options.repeats)
            ).figures())  # fmt: skip
            report.add("errors_in_log", server.logged_errors())
    report.write(options.output)


if __name__ == "__main__":
    main()
