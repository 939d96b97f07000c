"""A tenant's calls count from their entry."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from cluster.serving.auth import Tenant
from cluster.serving.calls.open_calls import OpenCall, OpenCalls
from pagedray.errors import OverloadedError

if TYPE_CHECKING:
    from pagedray.errors import PagedRayError

ANN = Tenant(name="ann", max_requests=1)


@dataclass(eq=False)
class Work:
    """What a call runs, which refers to it."""

    call: OpenCall

    def abort(self) -> None:
        pass

    def fail(self, error: PagedRayError) -> None:
        pass


def test_a_call_counts_before_it_begins() -> None:
    calls = OpenCalls()
    entered = calls.enter_call(ANN)
    with pytest.raises(OverloadedError, match="1 open call,"):
        calls.enter_call(ANN)
    # A drain waits only for calls that have begun.
    assert len(calls) == 0
    entered.leave()
    calls.enter_call(ANN)


def test_a_call_that_has_begun_stays_when_its_frontend_leaves() -> None:
    calls = OpenCalls()
    call = calls.enter_call(ANN)
    call.begin()
    call.leave()
    assert len(calls) == 1
    with pytest.raises(OverloadedError):
        calls.enter_call(ANN)
    call.close()
    calls.enter_call(ANN)


def test_a_call_that_may_resume_a_stream_enters_beyond_the_limit_but_does_not_begin() -> None:
    calls = OpenCalls()
    calls.enter_call(ANN).begin()
    entered = calls.enter_call(ANN, may_resume=True)
    with pytest.raises(OverloadedError):
        entered.begin()
    entered.leave()


def test_a_call_that_another_replica_admitted_has_no_limit() -> None:
    calls = OpenCalls()
    calls.enter_call(ANN).begin()
    calls.enter_call(ANN, is_admitted=True, may_resume=True).begin()


def test_the_work_of_a_closed_call_is_freed_at_once() -> None:
    calls = OpenCalls()
    call = calls.enter_call(ANN)
    call.begin()
    call.task = Work(call)
    work = weakref.ref(call.task)
    gc.disable()
    try:
        call.close()
        del call
        assert work() is None
    finally:
        gc.enable()
