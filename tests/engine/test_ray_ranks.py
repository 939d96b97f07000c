"""Calls to Ray that may block, causes of deaths, and weights that differ between ranks."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ray.exceptions import RayError

from cluster.engine.ray_health import result_unless
from cluster.engine.ray_ranks import cause_of, check_same_weights
from pagedray.errors import StartupError, WorkerError
from tests.thread_limit import no_more_threads

if TYPE_CHECKING:
    from types import FrameType

PERIOD_S = 0.001

FOLDER = Path("/models/m")
FILES = {"model-1.safetensors": "a", "model-2.safetensors": "b"}


def test_a_call_that_returns_just_after_a_period_gives_its_result() -> None:
    may_return = threading.Event()

    def call() -> int:
        may_return.wait()
        return 7

    def let_it_return() -> None:
        may_return.set()
        for thread in threading.enumerate():
            if thread.name == "pagedray-ray-call":
                thread.join()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:  # Any: as in `sys.settrace`
        """Let the call return when a wait for it fails, before anything else happens."""
        if event == "exception" and frame.f_code is result_unless.__code__:
            let_it_return()
        return trace

    sys.settrace(trace)
    try:
        assert result_unless(let_it_return, call, period_s=PERIOD_S) == 7
    finally:
        sys.settrace(None)


def test_a_call_raises_its_own_errors() -> None:
    def call() -> None:
        raise TimeoutError("Ray was slow.")

    with pytest.raises(TimeoutError, match="Ray was slow"):
        result_unless(lambda: None, call, period_s=PERIOD_S)


def test_a_call_that_blocks_is_abandoned() -> None:
    checks = iter(range(3))
    blocked = threading.Event()

    def check() -> None:
        if next(checks, None) is None:
            raise StartupError("Ray has ended.")

    with pytest.raises(StartupError, match="Ray has ended"):
        result_unless(check, blocked.wait, period_s=PERIOD_S)
    blocked.set()


def test_a_call_that_gets_no_thread_fails_and_may_be_repeated() -> None:
    with (
        no_more_threads(),
        pytest.raises(WorkerError, match=r"Ray could not be called: can't start new thread\."),
    ):
        result_unless(lambda: None, lambda: 7, period_s=PERIOD_S)
    assert result_unless(lambda: None, lambda: 7, period_s=PERIOD_S) == 7


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "The actor died unexpectedly.\nWorker exit type: SYSTEM_ERROR Worker exit detail: "
            "Worker unexpectedly exits with a connection error code 2. End of file. More.",
            "Worker unexpectedly exits with a connection error code 2.",
        ),
        ("The actor died.\n  Its node has failed.  \n\n", "Its node has failed."),
        ("", "RayError."),
    ],
)
def test_cause_is_the_detail_or_the_last_line(text: str, cause: str) -> None:
    assert cause_of(RayError(text)) == cause


def test_ranks_with_the_same_files_may_join() -> None:
    check_same_weights([FILES, dict(FILES), dict(FILES)], FOLDER)
    # Dummy weights have no files.
    check_same_weights([{}, {}], FOLDER)


@pytest.mark.parametrize(
    "other", [FILES | {"model-2.safetensors": "c"}, {"model-1.safetensors": "a"}]
)
def test_the_file_that_differs_is_named(other: dict[str, str]) -> None:
    expected = r"/models/m/model-2\.safetensors differs between rank 0 and rank 2"
    with pytest.raises(StartupError, match=expected):
        check_same_weights([FILES, FILES, other], FOLDER)
