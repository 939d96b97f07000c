"""Files of users, the load of a server, and bytes of ranks."""

from __future__ import annotations

import atexit
import io
import math
import socket
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console

from cluster.cli.top import Reading, TopView
from cluster.serving.auth import KeyFile
from cluster.serving.telemetry.load_history import LoadHistory
from cluster.simulation.workload import read_trace
from pagedray.batch import (
    BlockCopy,
    ControllerMessage,
    Decodes,
    SequencePlan,
    SequenceStart,
    StepMasks,
    StepOutput,
    StepPlan,
    TextBatch,
    WorkerMessage,
    pack_token_ids,
)
from pagedray.channel import ChannelClosedError, StepChannel
from pagedray.errors import PagedRayError, StartupError
from pagedray.sampling_params import SamplingParams
from pagedray.step_listener import StepListener
from tests.cli.loads_server import HISTORY, LOADS
from tests.cli.test_top import LATER
from tests.hostile.fuzz.target import Target, check_message, scratch_folder

_KINDS: tuple[object, ...] = (ControllerMessage, WorkerMessage)


def run_step_channel(data: bytes) -> None:
    """Receive messages that can be sent again, or ChannelClosedError.

    Of the first byte, one bit selects the receiver, and one puts a length before the rest.
    """
    if not data:
        return
    kind, sent = _KINDS[data[0] & 1], data[1:]
    if data[0] & 2:
        sent = len(sent).to_bytes(4, "big") + sent
    ours, theirs = socket.socketpair()
    with theirs:
        channel: StepChannel[object, object] = StepChannel(ours, kind)
        try:
            theirs.sendall(sent)
            for message in channel.received():
                encoded = msgspec.msgpack.encode(message)
                assert msgspec.msgpack.decode(encoded, type=kind) == message
        except ChannelClosedError:
            return
        finally:
            channel.close()


_PLAN = StepPlan(
    step=3,
    chunks=[SequencePlan(row=0, first_position=2, num_tokens=1, is_sampled=True)],
    starts=[
        SequenceStart(
            row=0,
            token_ids=pack_token_ids([5, 6, 7]),
            num_prompt_tokens=3,
            block_ids=[1, 2],
            sampling=SamplingParams(temperature=0.5, top_p=0.9, stop=("a",), logit_bias={3: 1.5}),
            seed=7,
            index=0,
        )
    ],
    decodes=Decodes.pack([1, 2], [4, 9], [1], [7]),
    swap_outs=[BlockCopy(1, 2)],
)
_MESSAGES = (
    (0, _PLAN),
    (0, StepMasks(step=3, words=b"\x01\x00\x00\x00")),
    (0, StepPlan(1, [], texts=TextBatch([[1, 2]], pooling="mean", is_normalized=True))),
    (1, StepOutput(step=3, token_ids=[9])),
)

STEP_CHANNEL = Target(
    run=run_step_channel,
    seeds=(
        *(bytes([2 | kind]) + msgspec.msgpack.encode(one) for kind, one in _MESSAGES),
        b"\x00\x00\x00\x00\x01\xc0\x00\x00\x00\x02\x91",
        b"\x00\xff\xff\xff\xff",
    ),
    words=(b"\xa4plan", b"\xa5masks", b"\xa6output", b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00"),
)


_SECRET = b"not in any input"
_LISTENER = StepListener("unix:")
atexit.register(_LISTENER.close)
_TIMEOUT_S = 60.0


class _ConnectionClosedError(Exception):
    pass


def run_rank_greeting(data: bytes) -> None:
    """Close the connection and go on waiting for the rank."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect("\0" + _LISTENER.endpoint.removeprefix("unix:"))
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        peer.setblocking(False)

        def check() -> None:
            try:
                peer.recv(1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # Closed with bytes that were not read.
                pass
            raise _ConnectionClosedError

        try:
            channels = _LISTENER.accept(1, _SECRET, _TIMEOUT_S, check=check)
        except _ConnectionClosedError:
            return
    channels[0].close()
    assert _SECRET in data


_HELLO = msgspec.msgpack.encode((0, b"a secret of 16 b"))

RANK_GREETING = Target(
    run=run_rank_greeting,
    seeds=(len(_HELLO).to_bytes(4, "big") + _HELLO, b"\x00\x00\x00\x01\xc0", b"GET / HTTP/1.1\r\n"),
    words=(b"\xc4\x10", b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", b"\xdd\x00\x00\x00\x02"),
    max_bytes=512,
)


def run_load_history(data: bytes) -> None:
    """Draw a picture of the terminal's size, or reject the response."""
    try:
        history = msgspec.json.decode(data, type=LoadHistory)
    except msgspec.MsgspecError:
        return
    drawn = io.StringIO()
    console = Console(file=drawn, width=80, height=24, color_system=None)
    reading = Reading(loads=LATER, before=LOADS, history=history)
    console.print(TopView("http://x", reading), height=24)
    assert "\x1b" not in drawn.getvalue()


LOAD_HISTORY = Target(
    run=run_load_history,
    seeds=(msgspec.json.encode(replace(HISTORY, samples=HISTORY.samples[:2])),),
    words=(b"null", b"-1", b"0", b"1e308", b"-0.0", b"9" * 30, b"1e-320"),
    max_bytes=1024,
)


_KEY_FILE_FOLDER = scratch_folder()


def run_key_file(data: bytes) -> None:
    """Return tenants or StartupError."""
    path = Path(_KEY_FILE_FOLDER, "keys.toml")
    path.write_bytes(data)
    path.chmod(0o600)
    try:
        keys = KeyFile.from_file(path)
    except StartupError as error:
        check_message(error)
        return
    assert set(keys.names.values()) <= set(keys.tenants)


_KEY = b"sha256:" + b"0123456789abcdef" * 4

KEY_FILE = Target(
    run=run_key_file,
    seeds=(
        b'[tenants.ann]\nkeys = ["' + _KEY + b'"]\nweight = 2.5\nmax_requests = 4\n',
        b'[tenants."b.c"]\nkeys = []\nis_admin = true\n[tenants.d]\nkeys = ["' + _KEY + b'"]\n',
    ),
    words=(b"inf", b"nan", b"1e400", b"'''", b"[[", b"1979-05-27T07:32:00Z", b"a.b.c = 1\n", b"{}"),
    max_bytes=1024,
)


_TRACE_FILE_FOLDER = scratch_folder()
_LINE = b'{"arrival_s": 0.5, "num_prompt_tokens": 8, "num_output_tokens": 4'


def run_trace_file(data: bytes) -> None:
    """Return requests by time, or an error of one line."""
    path = Path(_TRACE_FILE_FOLDER, "trace.jsonl")
    path.write_bytes(data)
    try:
        arrivals = read_trace(path)
    except PagedRayError as error:
        check_message(error)
        return
    times = [one.arrival_s for one in arrivals]
    assert times == sorted(times)
    assert all(map(math.isfinite, times))


TRACE_FILE = Target(
    run=run_trace_file,
    seeds=(
        _LINE + b"}\n\n" + _LINE + b', "tenant": "a", "prefix": "p", "num_prefix_tokens": 8}\n',
        _LINE + b', "tenant": null}',
    ),
    words=(b"\xff", b"\\ud800", b"1e400", b"-1", b"NaN", b"\r\n", b"\x85", b"[", b"9" * 400),
    max_bytes=512,
)
