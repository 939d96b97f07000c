"""Decides what happens when the logits of request after request are not finite.

Loading rejects weights that are not finite, so either these requests are the cause, and others are
not affected, or the ranks no longer compute correctly, for example because device memory is
corrupt. A test request of one token distinguishes the two.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from pagedray.errors import WorkerError
from pagedray.request import FinishReason, Request
from pagedray.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.scheduling.event import TokenEvent

__all__ = ["OutputWatch", "client_events", "make_engine_request"]

logger = logging.getLogger(__name__)

_MAX_IN_A_ROW = 3
"""Requests in a row that may have bad logits before the ranks are tested."""
_TEST_INTERVAL_S = 1.0
_MAX_TEST_S = 10.0
"""Limit of a test, after which another test is made: it may have ended with its ranks."""
_MAX_BROKEN_S = 30.0
"""Limit of failing tests, after which the engine ends and its supervisor restarts it."""
_LOG_INTERVAL_S = 60.0

_ID_PREFIX = "engine-"
# A tenant's only request always has room in the queue, and no client's tenant begins like this.
_TENANT_PREFIX = "\0"


class OutputWatch:
    """Follows requests with logits that were not finite, and makes test requests.

    It has no clock and no thread: times are arguments, and callers hold a lock.
    """

    def __init__(self) -> None:
        self._bad_ids: set[str] = set()
        """Requests with bad logits since the last finite logits."""
        self._num_tests = 0
        self._open_test: str | None = None
        self._tested_s = -math.inf
        self._broken_since_s: float | None = None
        self._next_log_s = -math.inf
        self.is_suspicious = False
        """Whether no logits were finite since some were not."""

    @property
    def is_broken(self) -> bool:
        """Whether the last test request failed."""
        return self._broken_since_s is not None

    def note_events(self, events: Iterable[TokenEvent], now_s: float) -> None:
        """Note the events of a step; none matter while all logits are finite."""
        is_test_finite = has_finite = False
        for event in events:
            is_test = event.request_id == self._open_test
            if event.token_ids:
                has_finite = True
                is_test_finite = is_test_finite or is_test
            elif event.finish_reason is FinishReason.ERROR:
                if is_test:
                    self._note_failed_test(now_s)
                elif len(self._bad_ids) < _MAX_IN_A_ROW:
                    self._bad_ids.add(event.request_id)
            if is_test and event.finish_reason is not None:
                self._open_test = None
        if has_finite:
            self._note_finite(now_s, is_test=is_test_finite)
        self.is_suspicious = bool(self._bad_ids) or self.is_broken or self._open_test is not None

    def next_test(self, now_s: float) -> Request | None:
        """Return a test request that is due.

        Raises WorkerError if tests have failed for too long.
        """
        if self._broken_since_s is not None and now_s >= self._broken_since_s + _MAX_BROKEN_S:
            raise WorkerError(f"The logits of the model were not finite for {_MAX_BROKEN_S:g} s.")
        is_due = self.is_broken or len(self._bad_ids) == _MAX_IN_A_ROW
        wait_s = _TEST_INTERVAL_S if self._open_test is None else _MAX_TEST_S
        if not is_due or now_s < self._tested_s + wait_s:
            return None
        self._tested_s = now_s
        self._num_tests += 1
        request = make_engine_request(f"output-test-{self._num_tests}", max_tokens=1)
        self._open_test = request.id
        return request

    def _note_finite(self, now_s: float, *, is_test: bool) -> None:
        """Note finite logits; `is_test` is true if a test has some of them."""
        if self.is_broken:
            logger.warning("The logits of the model are finite again.")
        elif is_test and now_s >= self._next_log_s:
            self._next_log_s = now_s + _LOG_INTERVAL_S
            logger.warning(
                "The logits of the last %d requests were not finite, but those of a test request "
                "are: the cause is in these requests. If the dtype is float16, try bfloat16.",
                _MAX_IN_A_ROW,
            )
        self._bad_ids.clear()
        self._broken_since_s = None

    def _note_failed_test(self, now_s: float) -> None:
        if self._broken_since_s is not None:
            return
        self._broken_since_s = now_s
        logger.error(
            "The logits of %d requests in a row and of a test request are not finite, so the "
            "engine is not ready. It ends in %g s unless a test request succeeds. Check the "
            "device's memory, for example with `nvidia-smi -q -d ECC,ROW_REMAPPER`; if the dtype "
            "is float16, try bfloat16.",
            _MAX_IN_A_ROW,
            _MAX_BROKEN_S,
        )


def make_engine_request(name: str, *, max_tokens: int) -> Request:
    """Return a greedy request with a prompt of one token, which a full queue accepts.

    No other open request may have this `name`.
    """
    return Request(
        id=f"{_ID_PREFIX}{name}",
        prompt_token_ids=(0,),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        seed=0,
        tenant=f"{_TENANT_PREFIX}{name}",
    )


def client_events(events: Iterable[TokenEvent]) -> list[TokenEvent]:
    """Return the events of the requests that clients sent."""
    return [event for event in events if not event.request_id.startswith(_ID_PREFIX)]
