"""Traces of requests, which `pagedray simulate` reads."""

from __future__ import annotations

import math
from pathlib import Path

from cluster.simulation.workload import read_trace
from pagedray.errors import PagedRayError
from tests.hostile.fuzz.scratch import scratch_folder
from tests.hostile.fuzz.target import Target, check_message

_FOLDER = scratch_folder()
_LINE = b'{"arrival_s": 0.5, "num_prompt_tokens": 8, "num_output_tokens": 4'


def run(data: bytes) -> None:
    """Return requests by time, or an error of one line."""
    path = Path(_FOLDER, "trace.jsonl")
    path.write_bytes(data)
    try:
        arrivals = read_trace(path)
    except PagedRayError as error:
        check_message(error)
        return
    times = [one.arrival_s for one in arrivals]
    assert times == sorted(times)
    assert all(map(math.isfinite, times))


TARGET = Target(
    run=run,
    seeds=(
        _LINE + b"}\n\n" + _LINE + b', "tenant": "a", "prefix": "p", "num_prefix_tokens": 8}\n',
        _LINE + b', "tenant": null}',
    ),
    words=(b"\xff", b"\\ud800", b"1e400", b"-1", b"NaN", b"\r\n", b"\x85", b"[", b"9" * 400),
    max_bytes=512,
)
