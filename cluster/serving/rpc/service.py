"""The methods of `pagedray.v1.GenerationService`: messages in, messages out.

They know protobuf but not gRPC's server, so Ray Serve's proxy runs the same methods. They raise
PagedRayError, which `status` translates. Each authenticates its call first.
"""

from __future__ import annotations

from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from cluster.serving.inputs import served_names
from cluster.serving.resume import StreamFormat
from cluster.serving.rpc import chat as grpc_chat
from cluster.serving.rpc import requests as grpc_requests
from cluster.serving.rpc import responses as grpc_responses
from pagedray.field_checks import check_size
from pagedray.v1 import pagedray_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from typing import Protocol

    from cluster.serving.auth import Tenant
    from cluster.serving.inputs import GenerationInput, Operation
    from cluster.serving.rpc.call import RpcCall
    from cluster.serving.servicer import GenerationCall, GenerationOutput, Servicer

    class _Write(Protocol):
        """Returns the message of an output."""

        def __call__(
            self, output: GenerationOutput, *, is_first: bool
        ) -> pb.GenerateResponse | pb.ChatResponse: ...


__all__ = ["COUNTED", "OPERATIONS", "SERVICE", "GrpcService"]

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]
"""The descriptor of the service."""
OPERATIONS: dict[str, Operation] = {
    "Generate": "text_completion",
    "Chat": "chat",
    "Embed": "embeddings",
    "Score": "score",
}
"""The methods that use the engine, and their operations."""
COUNTED = frozenset((*OPERATIONS, "Tokenize", "Detokenize"))
"""The methods with calls that count toward the limit of open calls."""

_MAX_ABORT_IDS = 1024
_MAX_DETOKENIZE_IDS = 2**17


class GrpcService:
    """The methods of the service, under their names in snake case."""

    def __init__(self, servicer: Servicer) -> None:
        self._servicer = servicer
        self._tool_format = servicer.tool_format
        self._intake = servicer.intake

    async def generate(
        self, message: pb.GenerateRequest, call: RpcCall
    ) -> AsyncGenerator[pb.GenerateResponse | bytes]:
        """Stream the completions of a prompt; the messages of a resumable stream are encoded."""
        tenant = self._tenant(call)
        if message.HasField("resume_from"):
            async with aclosing(self._resumed(message, "Generate", call, tenant)) as messages:
                async for one in messages:
                    yield one
            return
        with self._servicer.metrics.counting_rejections(call.frontend):
            given = grpc_requests.read_generation(message, call, tenant)
        generation = await self._servicer.start_generation(given, call.entered)
        if message.resumable:
            write = partial(grpc_responses.generate_response, generation.id)
            async with aclosing(self._kept(generation, write, "Generate")) as messages:
                async for one in messages:
                    yield one
            return
        # A cancelled call ends its request even while this coroutine waits for flow control.
        call.add_done_callback(generation.close)
        try:
            is_first = generation.replayed is None
            async with aclosing(generation.outputs()) as outputs:
                async for output in outputs:
                    yield grpc_responses.generate_response(generation.id, output, is_first=is_first)
                    is_first = False
        finally:
            generation.close()

    async def chat(
        self, message: pb.ChatRequest, call: RpcCall
    ) -> AsyncGenerator[pb.ChatResponse | bytes]:
        """Stream the assistant's next turn; the messages of a resumable stream are encoded."""
        tenant = self._tenant(call)
        if message.HasField("resume_from"):
            async with aclosing(self._resumed(message, "Chat", call, tenant)) as messages:
                async for one in messages:
                    yield one
            return
        with self._servicer.metrics.counting_rejections(call.frontend):
            chat, given = await self._intake.parse(
                call.num_bytes, lambda: self._read_chat(message, call, tenant)
            )
        generation = await self._servicer.start_generation(given, call.entered)
        chat.begin(generation.reasoning, self._servicer.tokenizer.token_bytes)
        if message.resumable:

            def write(output: GenerationOutput, *, is_first: bool) -> pb.ChatResponse:
                return chat.response(generation.id, output)

            async with aclosing(self._kept(generation, write, "Chat")) as messages:
                async for one in messages:
                    yield one
            return
        call.add_done_callback(generation.close)
        try:
            if generation.replayed is not None:
                # The client has received it; it brings the turns to where the call was cut off.
                chat.response(generation.id, generation.replayed)
            async with aclosing(generation.outputs()) as outputs:
                async for output in outputs:
                    yield chat.response(generation.id, output)
        finally:
            generation.close()

    async def embed(self, message: pb.EmbedRequest, call: RpcCall) -> pb.EmbedResponse:
        """Return the embeddings of texts."""
        tenant = self._tenant(call)
        with self._servicer.metrics.counting_rejections(call.frontend):
            given = grpc_requests.read_embedding(message, call, tenant)
        output = await self._servicer.embed(given, call.entered)
        return pb.EmbedResponse(
            embeddings=[pb.Embedding(values=vector) for vector in output.vectors],
            num_prompt_tokens=output.num_prompt_tokens,
        )

    async def score(self, message: pb.ScoreRequest, call: RpcCall) -> pb.ScoreResponse:
        """Return the relevance of documents to a query."""
        tenant = self._tenant(call)
        with self._servicer.metrics.counting_rejections(call.frontend):
            given = grpc_requests.read_score(message, call, tenant)
        output = await self._servicer.score(given, call.entered)
        return pb.ScoreResponse(
            scores=output.vectors[:, 0].tolist(), num_prompt_tokens=output.num_prompt_tokens
        )

    async def tokenize(self, message: pb.TokenizeRequest, call: RpcCall) -> pb.TokenizeResponse:
        """Return the token ids of a text or a conversation."""
        tenant = self._tenant(call)
        read = partial(
            grpc_chat.read_tokenize,
            message,
            tenant,
            self._intake.size,
            known_variables=self._known_variables,
            note_ignored=self._servicer.ignored.note,
        )
        given = await self._intake.parse(call.num_bytes, read)
        return pb.TokenizeResponse(token_ids=await self._servicer.tokenize(given))

    async def detokenize(
        self, message: pb.DetokenizeRequest, call: RpcCall
    ) -> pb.DetokenizeResponse:
        """Return the text of token ids."""
        tenant = self._tenant(call)
        check_size("token_ids", len(message.token_ids), _MAX_DETOKENIZE_IDS)
        skips = message.skip_special_tokens or not message.HasField("skip_special_tokens")
        text = await self._servicer.detokenize(
            tuple(message.token_ids),
            tenant=tenant.name,
            skip_special_tokens=skips,
            model=message.model or None,
        )
        return pb.DetokenizeResponse(text=text)

    async def abort(self, message: pb.AbortRequest, call: RpcCall) -> pb.AbortResponse:
        """Abort requests of the caller's tenant."""
        tenant = self._tenant(call)
        check_size("request_ids", len(message.request_ids), _MAX_ABORT_IDS)
        for client_id in message.request_ids:
            self._servicer.abort_call(tenant.name, client_id)
        return pb.AbortResponse()

    async def list_models(
        self, message: pb.ListModelsRequest, call: RpcCall
    ) -> pb.ListModelsResponse:
        """Return the served model, once for each of its names."""
        self._tenant(call)
        config = self._servicer.config
        models = [
            pb.Model(name=name, context_length=config.max_model_len, is_encoder=config.model.pools)
            for name in served_names(config.model)
        ]
        return pb.ListModelsResponse(models=models)

    async def get_server_info(
        self, message: pb.GetServerInfoRequest, call: RpcCall
    ) -> pb.GetServerInfoResponse:
        """Return the model, its configuration and the capacity of the server."""
        self._tenant(call)
        return grpc_responses.server_info_response(self._servicer.info())

    async def get_loads(self, message: pb.GetLoadsRequest, call: RpcCall) -> pb.GetLoadsResponse:
        """Return the current load of the server."""
        return grpc_responses.loads_response(self._servicer.loads(self._tenant(call)))

    def _read_chat(
        self, message: pb.ChatRequest, call: RpcCall, tenant: Tenant
    ) -> tuple[grpc_chat.Chat, GenerationInput]:
        chat = grpc_chat.Chat.from_message(message, tool_format=self._tool_format)
        given = chat.to_input(
            call,
            tenant,
            self._intake.size,
            known_variables=self._known_variables,
            note_ignored=self._servicer.ignored.note,
        )
        return chat, given

    def _known_variables(self, has_tools: bool) -> frozenset[str]:
        return self._servicer.tokenizer.template_variables(has_tools=has_tools)

    async def _kept(
        self, generation: GenerationCall, write: _Write, method: str
    ) -> AsyncGenerator[bytes]:
        """Yield the messages of a resumable stream to its first reader."""
        reader = self._servicer.resumables.open_stream(
            generation, _numbered(generation, write), StreamFormat("grpc", method)
        )
        try:
            async for messages in reader:
                for message in messages:
                    yield message
        finally:
            reader.close()

    async def _resumed(
        self,
        message: pb.GenerateRequest | pb.ChatRequest,
        method: str,
        call: RpcCall,
        tenant: Tenant,
    ) -> AsyncGenerator[bytes]:
        """Yield the messages of a resumable stream from where the client asks."""
        if call.entered is not None:
            # The call that the stream belongs to counts.
            call.entered.leave()
        with self._servicer.metrics.counting_rejections(call.frontend):
            grpc_requests.check_resume(message)
            reader = self._servicer.resumables.resume_stream(
                tenant.name,
                message.request_id,
                message.resume_from,
                protocol="grpc",
                form=StreamFormat("grpc", method),
            )
        self._servicer.metrics.count_resume(call.frontend)
        if reader is None:
            return
        try:
            async for messages in reader:
                for one in messages:
                    yield one
        finally:
            reader.close()

    def _tenant(self, call: RpcCall) -> Tenant:
        return self._servicer.authenticate(call.authorization)


async def _numbered(generation: GenerationCall, write: _Write) -> AsyncGenerator[tuple[bytes]]:
    """Yield the encoded message of each output, numbered from 1."""
    number = 0
    async with aclosing(generation.outputs()) as outputs:
        async for output in outputs:
            number += 1
            message = write(output, is_first=number == 1)
            message.number = number
            yield (message.SerializeToString(),)
