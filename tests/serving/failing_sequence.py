"""A request one of whose sequences fails in the engine."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cluster.scheduling.event import TokenEvent
from pagedray.request import FinishReason
from tests.fakes import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serving.conftest import Server

__all__ = ["failing_sequence"]


@contextmanager
def failing_sequence(
    server: Server, *token_ids: int, error: str = "", is_lethal: bool = False
) -> Iterator[None]:
    """Let the first sequence of the next request fail after some tokens, all in one step."""
    server.engine.is_paused = True
    submitted = server.engine.log.submitted

    def fail() -> None:
        wait_for(lambda: bool(submitted))
        request_id = submitted[0].id
        events = [TokenEvent(request_id, 0, (token_id,)) for token_id in token_ids]
        end = TokenEvent(
            request_id, 0, finish_reason=FinishReason.ERROR, error=error, is_lethal=is_lethal
        )
        server.client.publish([*events, end])

    thread = threading.Thread(target=fail)
    thread.start()
    try:
        yield
    finally:
        thread.join()
