"""A client's request in Ray Serve's gRPC proxy, which may be sent to several replicas."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from cluster.serving.intake.limits import LARGEST, MAX_REQUEST_BYTES
from cluster.serving.ray_serve.proxied_grpc.context import ProxiedGrpcContext
from cluster.serving.ray_serve.proxied_grpc.message import TIMEOUT_KEY
from cluster.serving.ray_serve.routing.affinity import (
    MAX_KEY_MESSAGES,
    MAX_KEY_TOKENS,
    Owners,
    RoutingKey,
    prefix_key,
)
from cluster.serving.rpc.call import AUTHORIZATION
from cluster.serving.rpc.context import Context, abort_call
from cluster.serving.rpc.field_count import check_fields
from cluster.serving.rpc.message_limit import check_message_size
from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import MAX_N
from pagedray.v1 import pagedray_pb2 as pb

if TYPE_CHECKING:
    from cluster.serving.ray_serve.routing.proxied_call import ProxiedCall

__all__ = ["ProxiedGrpcRequest"]

_SESSION_KEY = "session_id"
_GENERATING: dict[str, type[pb.GenerateRequest | pb.ChatRequest]] = {
    "Generate": pb.GenerateRequest,
    "Chat": pb.ChatRequest,
}
_UNFINISHED = pb.FINISH_REASON_UNSPECIFIED


class ProxiedGrpcRequest:
    """A client's request, which may be sent to several replicas."""

    def __init__(
        self, body: bytes, method: str, owners: Owners, *, remaining_s: float | None
    ) -> None:
        self.body = body
        self._owners = owners
        self._message = _parsed(body, method)
        self._key = _routing_key(self._message)
        self._response_kind: type[pb.GenerateResponse | pb.ChatResponse] = (
            pb.ChatResponse if method.endswith("/Chat") else pb.GenerateResponse
        )
        limits_s = [] if remaining_s is None else [remaining_s]
        if self._message is not None and self._message.HasField("timeout"):
            # Beyond the range of a timedelta too.
            timeout_s = self._message.timeout.seconds + self._message.timeout.nanos / 1e9
            # The replica rejects it otherwise.
            limits_s += [timeout_s] if timeout_s > 0 else []
        self._deadline_s = time.monotonic() + min(limits_s) if limits_s else None

    @classmethod
    async def received(cls, context: Context, method: str, owners: Owners) -> ProxiedGrpcRequest:
        """Return the request, or end the call if it has no message, or a too long message."""
        body: Any = await context.read()  # Any: bytes, or grpc's mark of the end.
        try:
            if not isinstance(body, bytes):
                raise InvalidRequestError("The call has no message.", param="message")
            check_message_size(body, MAX_REQUEST_BYTES)
        except InvalidRequestError as error:
            await abort_call(context, error)
        return cls(body, method, owners, remaining_s=context.time_remaining())

    @property
    def num_sequences(self) -> int:
        """The sequences that the call generates."""
        if self._message is None or not self._message.sampling.HasField("n"):
            return 1
        return min(self._message.sampling.n, MAX_N)

    def proxied(self, context: Context) -> ProxiedGrpcContext:
        """Return the context of the next attempt."""
        metadata = [
            (key, value) for key, value in context.invocation_metadata() or () if key != TIMEOUT_KEY
        ]
        if self._deadline_s is not None:
            remaining_ms = int((self._deadline_s - time.monotonic()) * 1000)
            metadata.append((TIMEOUT_KEY, str(max(remaining_ms, 0))))
        given = {str(key): str(value) for key, value in metadata if not isinstance(value, bytes)}
        text = given.get(_SESSION_KEY) or self._key
        if text:
            key = RoutingKey(text, self._owners.owner_of(given.get(AUTHORIZATION)))
            # The last one counts.
            metadata.append((_SESSION_KEY, key.as_session_id()))
        return ProxiedGrpcContext(context, metadata)

    def note_response(self, body: bytes, call: ProxiedCall) -> None:
        """Record the progress that a message adds to the call."""
        message = self._response_kind.FromString(body)
        if message.HasField("prompt_info"):
            call.note_cached_tokens(message.prompt_info.num_cached_tokens)
        call.add_tokens(
            [
                (one.index, one.token_ids, one.finish_reason != _UNFINISHED)
                for one in message.sequences
            ]
        )
        if message.HasField("usage"):
            call.is_complete = True


def _parsed(body: bytes, method: str) -> pb.GenerateRequest | pb.ChatRequest | None:
    """Return the message of a call that generates; None for others and for invalid messages."""
    kind = _GENERATING.get(method.rpartition("/")[2])
    if kind is None:
        return None
    try:
        # A proxy has no keys, so anyone could hold its event loop by parsing millions of fields.
        check_fields(kind, body, LARGEST)
        return kind.FromString(body)
    except (DecodeError, InvalidRequestError):
        # The replica rejects it with the same error as every frontend.
        return None


def _routing_key(message: pb.GenerateRequest | pb.ChatRequest | None) -> str | None:
    """Return the routing key of a call, which depends on the beginning of its prompt, or None."""
    if message is None:
        return None
    if isinstance(message, pb.ChatRequest):
        return prefix_key(message.messages[:MAX_KEY_MESSAGES])  # type: ignore[arg-type]  # the stubs are narrower than the library
    return prefix_key(message.token_ids.ids[:MAX_KEY_TOKENS] or message.text)
