"""Requests of the engine itself: always queued, and not seen by clients."""

from __future__ import annotations

import pytest

from cluster.engine.output_watch import client_events, make_engine_request
from cluster.scheduling.event import TokenEvent
from pagedray.errors import OverloadedError
from tests.scheduling.harness import Harness


def test_full_queue_accepts_engine_requests() -> None:
    harness = Harness(max_queued_requests=1)
    harness.add([1])
    with pytest.raises(OverloadedError):
        harness.add([1])
    for name in ("probe", "output-test-1", "output-test-2"):
        harness.scheduler.add_request(make_engine_request(name, max_tokens=1))
    assert harness.scheduler.num_waiting == 4


def test_clients_do_not_receive_events_of_engine_requests() -> None:
    request = make_engine_request("probe", max_tokens=1)
    of_client = TokenEvent("a", 0, (7,))
    assert client_events([of_client, TokenEvent(request.id, 0, (7,))]) == [of_client]
