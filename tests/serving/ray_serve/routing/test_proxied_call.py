"""How long a call waits for another replica."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from cluster.serving.ray_serve.proxied_call import HeldBytes, ProxiedCall
from tests.virtual_time import in_virtual_time

if TYPE_CHECKING:
    from cluster.serving.continuation import Cause


async def is_accepted(cause: Cause, after_s: float) -> bool:
    """Return whether a call that lost its replica goes on with one that accepts it then."""
    call = ProxiedCall(HeldBytes())
    async with call.sending():
        call.note_sent("one", may_continue=True)
    assert call.continues_after(cause)
    try:
        async with call.sending():
            await asyncio.sleep(after_s)
            call.note_accepted()
            # Its first token takes as long as that of any call.
            await asyncio.sleep(30.0)
    except TimeoutError:
        return False
    return True


@in_virtual_time
async def test_a_call_outlasts_a_pause_of_the_replica_that_is_left() -> None:
    assert await is_accepted("died", after_s=8.5)


@pytest.mark.parametrize(("cause", "after_s"), [("died", 15.0), ("hung", 8.0)])
@in_virtual_time
async def test_a_call_that_no_replica_accepts_ends(cause: Cause, after_s: float) -> None:
    assert not await is_accepted(cause, after_s)
