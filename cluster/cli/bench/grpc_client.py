"""A load test's gRPC client of a PagedRay server."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import grpc

from cluster.cli.bench.client import (
    KEY_VARIABLES,
    BenchClient,
    BenchError,
    BenchRequest,
    DraftCounts,
    Timing,
)
from cluster.cli.client_flags import with_key_hint
from pagedray.errors import StartupError
from pagedray.v1 import pagedray_pb2, pagedray_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.cli.bench.client import Target

__all__ = ["GrpcClient"]

_NUM_CONNECTIONS = 8
_CALL_S = 30.0
# Each channel gets a connection of its own.
_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))


class GrpcClient(BenchClient):
    """Streams Generate or Chat over several connections, in turns."""

    def __init__(self, target: Target) -> None:
        """Raises StartupError for CA certificates that cannot be read."""
        self._target = target
        self._credentials: grpc.ChannelCredentials | None = None
        if target.is_encrypted:
            try:
                roots = None if target.ca_file is None else target.ca_file.read_bytes()
            except OSError as error:
                raise StartupError(f"Cannot read --tls-ca {target.ca_file}: {error}.") from error
            self._credentials = grpc.ssl_channel_credentials(roots)
        self._metadata = () if target.key is None else (("authorization", f"Bearer {target.key}"),)
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: Iterator[pagedray_pb2_grpc.GenerationServiceStub] = iter(())
        self._model = ""

    async def open(self, model: str | None) -> str:
        for _ in range(_NUM_CONNECTIONS):
            address = self._target.address
            self._channels.append(
                grpc.aio.insecure_channel(address, options=_OPTIONS)
                if self._credentials is None
                else grpc.aio.secure_channel(address, self._credentials, options=_OPTIONS)
            )
        self._stubs = itertools.cycle(map(pagedray_pb2_grpc.GenerationServiceStub, self._channels))
        if model is None:
            found = await self._ask("ListModels", pagedray_pb2.ListModelsRequest())
            model = found.models[0].name
        self._model = model
        return model

    async def _ask(self, method: str, message: object) -> Any:  # Any: the message of the method
        """Return the answer of a method. Raises BenchError."""
        call = getattr(next(self._stubs), method)
        try:
            return await call(message, metadata=self._metadata, timeout=_CALL_S)
        except grpc.aio.AioRpcError as error:
            raise _rejection(error) from error

    async def stream(self, request: BenchRequest) -> Timing:
        started_s = time.perf_counter()
        call = self._call(request)
        arrivals: list[float] = []
        usage = pagedray_pb2.Usage()
        try:
            async for message in call:
                for sequence in message.sequences:
                    if sequence.finish_reason == pagedray_pb2.FINISH_REASON_ERROR:
                        raise BenchError(sequence.stop_reason)
                if any(sequence.token_ids for sequence in message.sequences):
                    arrivals.append(time.perf_counter())
                if message.HasField("usage"):
                    usage = message.usage
        except grpc.aio.AioRpcError as error:
            raise _rejection(error) from error
        return Timing(
            started_s=started_s,
            arrivals_s=tuple(arrivals),
            ended_s=time.perf_counter(),
            num_prompt_tokens=usage.num_prompt_tokens,
            num_generated_tokens=usage.num_generated_tokens,
        )

    async def encode(self, text: str) -> list[int]:
        request = pagedray_pb2.TokenizeRequest(text=text, model=self._model)
        return list((await self._ask("Tokenize", request)).token_ids)

    async def decode(self, token_ids: list[int]) -> str:
        request = pagedray_pb2.DetokenizeRequest(token_ids=token_ids, model=self._model)
        return str((await self._ask("Detokenize", request)).text)

    async def count_drafts(self) -> DraftCounts:
        try:
            loads = await next(self._stubs).GetLoads(
                pagedray_pb2.GetLoadsRequest(), metadata=self._metadata, timeout=_CALL_S
            )
        except grpc.aio.AioRpcError:
            return DraftCounts()
        return DraftCounts(
            loads.num_chains, loads.num_draft_tokens, loads.num_accepted_draft_tokens
        )

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close(None)

    # Any: the generated stubs have no types.
    def _call(self, request: BenchRequest) -> Any:
        sampling = pagedray_pb2.SamplingParams(
            max_tokens=request.max_tokens,
            temperature=self._target.temperature,
            ignore_eos=self._target.ignore_eos,
        )
        stub = next(self._stubs)
        if self._target.is_chat:
            role = pagedray_pb2.CHAT_ROLE_USER
            turn = pagedray_pb2.ChatMessage(role=role, content=request.prompt)
            return stub.Chat(
                pagedray_pb2.ChatRequest(messages=[turn], sampling=sampling, model=self._model),
                metadata=self._metadata,
                timeout=self._target.timeout_s,
            )
        return stub.Generate(
            pagedray_pb2.GenerateRequest(text=request.prompt, sampling=sampling, model=self._model),
            metadata=self._metadata,
            timeout=self._target.timeout_s,
        )


def _rejection(error: grpc.aio.AioRpcError) -> BenchError:
    details = error.details() or ""
    # Another protocol's answer or status looks like this to a gRPC client.
    if "HTTP/2" in details or "http2 header" in details:
        return BenchError(
            "The server does not respond in gRPC; --base-url must have its gRPC port, not that of "
            "HTTP."
        )
    message = f"{error.code().name}: {details}"
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        message = with_key_hint(message, variables=KEY_VARIABLES)
    return BenchError(message)
