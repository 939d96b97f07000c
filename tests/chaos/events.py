"""The history of a run: one JSON object per line, each an event of a kind below.

Times are seconds since the run began, of one monotonic clock.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    """Something that happened."""

    at_s: float


class RunStarted(Event, frozen=True, tag="run_started"):
    """The server is up and the undisturbed texts are known; clients start."""

    command: str
    seed: int
    target: str


class ReferenceSequence(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence of an undisturbed run."""

    token_ids: tuple[int, ...]
    text: str
    reason: str


class Reference(Event, frozen=True, tag="reference"):
    """What a request gives on an undisturbed server."""

    spec: str
    sequences: tuple[ReferenceSequence, ...]


class CallSent(Event, frozen=True, tag="call_sent"):
    """A client sent a request."""

    call: str
    spec: str
    frontend: str
    tenant: str
    is_to_be_aborted: bool = False
    """The client will cancel or abort it, if it has not ended before."""


class CallAccepted(Event, frozen=True, tag="call_accepted"):
    """The server answered with the first part of a stream."""

    call: str


class Tokens(Event, frozen=True, tag="tokens"):
    """What a sequence of a call gained between two times."""

    call: str
    sequence: int
    until_s: float
    begin: int
    """How many tokens the sequence had before, or how many characters over HTTP."""
    token_ids: tuple[int, ...] = ()
    """Empty for HTTP, which sends text alone."""
    text: str = ""


class SequenceEnded(Event, frozen=True, tag="sequence_ended"):
    """The server sent a finish reason."""

    call: str
    sequence: int
    reason: str


class CallEnded(Event, frozen=True, tag="call_ended"):
    """The client's side of a call is over."""

    call: str
    status: str
    """`ok`, `cancelled` if the client itself ended it, or the error."""
    num_generated: int | None = None
    """From the usage, if the server sent one."""


class FaultInjected(Event, frozen=True, tag="fault_injected"):
    """A fault begins."""

    number: int
    faults: tuple[str, ...]
    """One, or a pair."""
    may_end_streams: bool
    limit_s: float
    """The time in which the fault must have healed."""
    pause_limit_s: float = 60.0
    """The longest pause that a stream may have."""


class FaultSeen(Event, frozen=True, tag="fault_seen"):
    """The server stopped being ready, or one of its processes was gone."""

    number: int


class FaultHealed(Event, frozen=True, tag="fault_healed"):
    """The server was ready, all its processes were there, and tokens arrived."""

    number: int


class Readiness(Event, frozen=True, tag="readiness"):
    """The answer of /ready changed."""

    state: str
    """`ready`, `not_ready` or `no_answer`."""


class ServerStarted(Event, frozen=True, tag="server_started"):
    """The supervisor started the server again."""


class ServerExited(Event, frozen=True, tag="server_exited"):
    """The server's process ended."""

    code: int


class Resources(Event, frozen=True, tag="resources"):
    """What the server holds while no call is open."""

    when: str
    """`before` or `after`."""
    num_processes: int
    num_descriptors: int
    num_shared_memory: int
    num_blocks: int
    num_free_blocks: int
    num_calls: int
    rss_mib: float


class Leftovers(Event, frozen=True, tag="leftovers"):
    """What is still there after the server was stopped."""

    processes: tuple[str, ...]
    shared_memory: tuple[str, ...]
    num_tracebacks: int = 0
    """Python tracebacks in the server's log: unhandled errors."""
    first_traceback: str = ""


class ClientLag(Event, frozen=True, tag="client_lag"):
    """The clients' own process did not run for this long."""

    seconds: float


class RunEnded(Event, frozen=True, tag="run_ended"):
    """Clients have ended all calls."""


_Any = (
    RunStarted
    | Reference
    | CallSent
    | CallAccepted
    | Tokens
    | SequenceEnded
    | CallEnded
    | FaultInjected
    | FaultSeen
    | FaultHealed
    | Readiness
    | ServerStarted
    | ServerExited
    | Resources
    | Leftovers
    | ClientLag
    | RunEnded
)


_encoder = msgspec.json.Encoder()


_decoder = msgspec.json.Decoder(_Any)


def encode(event: Event) -> bytes:
    """Return the line of an event."""
    return _encoder.encode(event) + b"\n"


def read_history(path: Path) -> Iterator[Event]:
    """Yield the events of a file."""
    with path.open("rb") as file:
        for line in file:
            yield _decoder.decode(line)


class History:
    """A file of events, as a context manager."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._started_s = time.monotonic()
        self.num_arrivals = 0
        """Grows while tokens arrive."""

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return round(time.monotonic() - self._started_s, 4)

    def add(self, event: Event) -> None:
        """Write an event."""
        self._file.write(encode(event))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
