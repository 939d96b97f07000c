"""Messages that arrive while there is no room for them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import grpc

from cluster.serving.auth import ANONYMOUS
from cluster.serving.call_options import CallOptions
from cluster.serving.intake import IntakeLimits
from pagedray.v1 import pagedray_pb2 as pb
from tests.serving.grpc_frontend import grpc_frontend
from tests.serving.waiting import wait_until

if TYPE_CHECKING:
    from cluster.serving.text.tokenizer import Tokenizer

TENANT_BYTES = 64 * 2**20
# None waits for so long that it is rejected.
LIMITS = IntakeLimits(wait_s=600.0)
REQUEST = pb.TokenizeRequest(text="hello")


async def test_calls_wait_while_others_that_are_read_have_all_the_room(
    tokenizer: Tokenizer,
) -> None:
    async with (
        grpc_frontend(tokenizer, calls=CallOptions(intake_limits=LIMITS)) as server,
        grpc.aio.insecure_channel(server.target) as channel,
    ):
        stub = server.stub(channel)
        reception = server.servicer.intake.reception
        with reception.open_message(ANONYMOUS.name) as others:
            assert others.reserve(TENANT_BYTES)
            calls = [stub.Tokenize(REQUEST) for _ in range(300)]
            await wait_until(
                lambda: reception.num_waiting + sum(call.done() for call in calls) == 300
            )
        codes = Counter([await call.code() for call in calls])
        assert codes == {grpc.StatusCode.OK: 256, grpc.StatusCode.RESOURCE_EXHAUSTED: 44}
        assert reception.num_bytes == 0
