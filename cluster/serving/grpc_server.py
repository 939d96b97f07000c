"""The gRPC front: `pagedray.v1.GenerationService`, health and reflection.

It turns protobuf messages into the servicer's words and back; it decides nothing about a
request. This is the only front module that knows gRPC and protobuf.
"""

from __future__ import annotations

import logging
import struct
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from cluster.serving.inputs import GenerationInput, Prompt
from cluster.serving.listener import listen
from pagedray import __version__
from pagedray.errors import InvalidRequestError, PagedRayError
from pagedray.request import MAX_LOGIT_BIAS, FinishReason
from pagedray.v1 import pagedray_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from cluster.serving.metrics import Metrics
    from cluster.serving.servicer import Generation, GenerationOutput, Servicer
    from cluster.serving.text_stream import SequenceOutput
    from pagedray.batch import TokenLogprobs

__all__ = ["GrpcServer"]

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 * 2**20
_SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Without this a second server binds the same port and takes half of the calls.
    ("grpc.so_reuseport", 0),
    # A compressed message may be small on the wire and huge in memory: only identity is taken.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)
_MAX_ABORT_IDS = 1024
_INTERNAL_TEXT = "The server made a mistake; its log says which."
_FINISH_REASONS = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORTED,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_FLOAT = struct.Struct("<f")

Incoming = TypeVar("Incoming", bound=Message)
Outgoing = TypeVar("Outgoing", bound=Message)
# grpc's own stubs leave the context's message types open.
Context = grpc.aio.ServicerContext[Any, Any]


class GrpcServer:
    """The gRPC server on one port."""

    def __init__(self, servicer: Servicer, *, host: str, port: int) -> None:
        self._servicer = servicer
        self._host = host
        self._wanted_port = port
        self._health = HealthServicer()
        self._server: grpc.aio.Server | None = None
        self.port = 0
        """The port that is bound, once it is."""

    async def start(self) -> None:
        """Bind the port and answer. Raises DeviceError if the port is not to be had."""
        await self.set_serving(False)
        server = grpc.aio.server(options=_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        server.add_generic_rpc_handlers((_handlers(self._servicer),))
        names = (_SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
        host = f"[{self._host}]" if ":" in self._host else self._host
        # gRPC would only say that it failed, and log why on its own.
        listen("gRPC", self._host, self._wanted_port).close()
        self.port = server.add_insecure_port(f"{host}:{self._wanted_port}")
        await server.start()
        self._server = server

    async def set_serving(self, is_serving: bool) -> None:
        """Say over grpc.health.v1 whether requests are served."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        for service in ("", _SERVICE):
            await self._health.set(service, status.SERVING if is_serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Take no more calls and end those that run longer than `grace_s`."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace_s)


class _Service:
    """The methods of GenerationService."""

    def __init__(self, servicer: Servicer) -> None:
        self._servicer = servicer

    async def generate(
        self, message: pb.GenerateRequest, context: Context
    ) -> AsyncGenerator[pb.GenerateResponse]:
        with self._servicer.metrics.counting_refusals():
            given = _read_input(message, context)
        generation = await self._servicer.start(given)
        # A cancelled call ends its request even while this coroutine waits for flow control.
        context.add_done_callback(lambda _: generation.close())  # type: ignore[arg-type]  # any callable
        try:
            is_first = True
            async with aclosing(generation.outputs()) as outputs:
                async for output in outputs:
                    yield _response(generation, output, is_first=is_first)
                    is_first = False
        finally:
            generation.close()

    async def abort(self, message: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        if len(message.request_ids) > _MAX_ABORT_IDS:
            raise InvalidRequestError(
                f"request_ids may have {_MAX_ABORT_IDS} entries, not {len(message.request_ids)}.",
                param="request_ids",
            )
        for client_id in message.request_ids:
            self._servicer.abort("", client_id)
        return pb.AbortResponse()

    async def tokenize(self, message: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        adds_special = message.add_special_tokens or not message.HasField("add_special_tokens")
        token_ids = await self._servicer.validator.tokenize(
            message.text, add_special_tokens=adds_special
        )
        return pb.TokenizeResponse(token_ids=token_ids)

    async def get_model_info(
        self, message: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        config = self._servicer.config
        scheduler = self._servicer.client.engine.stats().scheduler
        return pb.GetModelInfoResponse(
            name=config.model.name,
            architecture=config.model.architecture,
            vocab_size=config.model.vocab_size,
            context_length=config.max_model_len,
            block_size=config.cache.block_size,
            num_blocks=scheduler.num_blocks,
            num_cpu_blocks=scheduler.num_cpu_blocks,
            num_ranks=config.parallel.tensor_parallel_size,
            dtype=config.model.dtype,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            version=__version__,
        )


def _handlers(servicer: Servicer) -> grpc.GenericRpcHandler[Any, Any]:
    # Registered by hand: the generated code answers a malformed message with INTERNAL.
    service = _Service(servicer)
    return grpc.method_handlers_generic_handler(
        _SERVICE,
        {
            "Generate": grpc.unary_stream_rpc_method_handler(
                _streaming(service.generate, pb.GenerateRequest, servicer.metrics),
                response_serializer=pb.GenerateResponse.SerializeToString,
            ),
            "Abort": grpc.unary_unary_rpc_method_handler(
                _unary(service.abort, pb.AbortRequest),
                response_serializer=pb.AbortResponse.SerializeToString,
            ),
            "Tokenize": grpc.unary_unary_rpc_method_handler(
                _unary(service.tokenize, pb.TokenizeRequest),
                response_serializer=pb.TokenizeResponse.SerializeToString,
            ),
            "GetModelInfo": grpc.unary_unary_rpc_method_handler(
                _unary(service.get_model_info, pb.GetModelInfoRequest),
                response_serializer=pb.GetModelInfoResponse.SerializeToString,
            ),
        },
    )


def _unary(
    method: Callable[[Incoming, Context], Awaitable[Outgoing]], kind: type[Incoming]
) -> Callable[[bytes, Context], Awaitable[Outgoing]]:
    async def handle(body: bytes, context: Context) -> Outgoing:
        try:
            return await method(_parse(kind, body), context)
        except Exception as error:
            await _refuse(context, error)

    return handle


def _streaming(
    method: Callable[[Incoming, Context], AsyncGenerator[Outgoing]],
    kind: type[Incoming],
    metrics: Metrics,
) -> Callable[[bytes, Context], AsyncGenerator[Outgoing]]:
    async def handle(body: bytes, context: Context) -> AsyncGenerator[Outgoing]:
        try:
            with metrics.counting_refusals():
                incoming = _parse(kind, body)
            async with aclosing(method(incoming, context)) as messages:
                async for message in messages:
                    yield message
        except Exception as error:
            await _refuse(context, error)

    return handle


async def _refuse(context: Context, error: Exception) -> NoReturn:
    # The one table from errors to codes is the error classes themselves: `grpc_status`.
    if isinstance(error, PagedRayError):
        await context.abort(grpc.StatusCode[error.grpc_status], str(error))
    if isinstance(error, grpc.aio.AbortError | grpc.aio.BaseError | grpc.RpcError):
        raise error
    logger.error("A gRPC call failed.", exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, _INTERNAL_TEXT)
    raise AssertionError


def _parse(kind: type[Incoming], body: bytes) -> Incoming:
    try:
        message = kind.FromString(body)
    except DecodeError as error:
        raise InvalidRequestError(f"The message is not a valid {kind.__name__}.") from error
    _check_known_fields(message)
    return message


def _check_known_fields(message: Message) -> None:
    unknown = UnknownFieldSet(message)
    if len(unknown) > 0:
        number = unknown[0].field_number
        raise InvalidRequestError(f"{type(message).__name__} has no field {number}.")
    for _descriptor, value in message.ListFields():
        if isinstance(value, Message):
            _check_known_fields(value)


def _read_input(message: pb.GenerateRequest, context: Context) -> GenerationInput:
    remaining_s = context.time_remaining()
    return GenerationInput(
        prompts=(_read_prompt(message),),
        sampling=_read_sampling(message.sampling),
        client_id=message.request_id or None,
        priority=message.priority,
        deadline_s=None if remaining_s is None else time.monotonic() + remaining_s,
    )


def _read_prompt(message: pb.GenerateRequest) -> Prompt:
    if message.WhichOneof("prompt") == "token_ids":
        return tuple(message.token_ids.ids)
    return message.text


def _read_sampling(message: pb.SamplingParams) -> dict[str, object]:
    given: dict[str, object] = {}
    for descriptor, value in message.ListFields():
        name = descriptor.name
        if name == "logit_bias":
            if len(value) > MAX_LOGIT_BIAS:
                raise InvalidRequestError(
                    f"{name} may have {MAX_LOGIT_BIAS} entries, not {len(value)}.", param=name
                )
            given[name] = {token_id: _decimal(bias) for token_id, bias in value.items()}
        elif isinstance(value, bool | int):
            given[name] = value
        elif isinstance(value, float):
            given[name] = _decimal(value)
        else:
            given[name] = tuple(value)
    return given


def _decimal(value: float) -> float:
    """Return the shortest decimal number that this 32-bit number may have been.

    A client that sends 0.7 means what an HTTP client means by it.
    """
    for num_digits in range(6, 9):
        candidate = float(f"{value:.{num_digits}g}")
        if abs(candidate) < 3e38 and _FLOAT.unpack(_FLOAT.pack(candidate))[0] == value:
            return candidate
    return value


def _response(
    generation: Generation, output: GenerationOutput, *, is_first: bool
) -> pb.GenerateResponse:
    usage = output.usage
    response = pb.GenerateResponse(
        request_id=generation.id,
        sequences=[_sequence(sequence) for sequence in output.sequences],
    )
    if is_first:
        response.prompt_info.num_prompt_tokens = usage.num_prompt_tokens
        response.prompt_info.num_cached_tokens = usage.num_cached_tokens
    if output.is_last:
        response.usage.num_prompt_tokens = usage.num_prompt_tokens
        response.usage.num_cached_tokens = usage.num_cached_tokens
        response.usage.num_generated_tokens = usage.num_generated_tokens
    return response


def _sequence(output: SequenceOutput) -> pb.SequenceOutput:
    stop_reason = "" if output.stop_reason is None else str(output.stop_reason)
    if output.finish_reason is FinishReason.ERROR:
        stop_reason = "The engine could not compute the next token."
    return pb.SequenceOutput(
        index=output.index,
        text=output.text,
        token_ids=output.token_ids,
        logprobs=[_logprobs(logprobs) for logprobs in output.logprobs],
        finish_reason=_FINISH_REASONS[output.finish_reason],
        stop_reason=stop_reason,
    )


def _logprobs(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    top = zip(logprobs.token_ids, logprobs.logprobs, strict=True)
    return pb.TokenLogprobs(
        logprob=logprobs.chosen,
        top_logprobs=[pb.TopLogprob(token_id=token, logprob=value) for token, value in top],
    )
