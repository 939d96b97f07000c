"""PagedRay as a Ray Serve application: `serve run pagedray:build_app model=...`.

A replica of the deployment is a controller with its servicer; its placement group holds the
ranks. HTTP and gRPC reach the servicer in the replica itself, without another hop.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from cluster.engine.engine_options import full_name
from cluster.serving.http_app import build_http_app
from cluster.serving.intake import BufferLimits
from cluster.serving.ray_serve.grpc_frontend import Incoming, ServeGrpc
from cluster.serving.ray_serve.handle import ServeHandle
from cluster.serving.ray_serve.options import (
    MESSAGES_PER_S,
    MessagePace,
    ServeArguments,
    ServeOptions,
    read_arguments,
)
from cluster.serving.ray_serve.proxied_call import receive_carried
from cluster.serving.ray_serve.replica_calls import (
    call_named,
    call_others,
    current_call_id,
    find_replica,
)
from cluster.serving.ray_serve.replica_engine import ServedReplica
from cluster.serving.responses.stored_responses import (
    Kept,
    LostReplicaError,
    ResponseStore,
    StoredResponses,
    StoreLimits,
)
from workers.hub.locate import pin_model

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from google.protobuf.message import Message
    from ray.actor import ActorHandle
    from ray.serve import Application
    from ray.serve._private.common import ReplicaID
    from ray.serve.grpc_util import RayServegRPCContext
    from starlette.types import ASGIApp, Receive, Scope, Send

    from cluster.engine.engine_options import EngineOptions
    from cluster.serving.continuation import Continuation
    from cluster.serving.inputs import Prompt
    from cluster.serving.responses.stored_responses import Action
    from cluster.serving.server_info import ServerLoads
    from cluster.serving.servicer import EmbeddingOutput, GenerationOutput
    from pagedray.config import Device
    from pagedray.sampling_params import SamplingParams

__all__ = ["PagedRay", "build_app", "deployment_options"]

# The engine does admission control: it knows how many tokens fit.
_NO_LIMIT = 1_000_000_000
_ROUTER = "cluster.serving.ray_serve.router:AffinityRouter"
# Serve carries more HTTP messages than others, but its queue has no bound.
_HTTP_PARTS_PER_S = 2000.0
_ABORT_WAIT_S = 0.5
_POLICY = "cluster.serving.ray_serve.autoscaling:TokensPolicy"

_TIMEOUT_S = 5.0
_MAX_LOOKUPS = 4
"""Replicas that are looked up at once; clients choose the names."""


@serve.ingress()
class PagedRay(ServedReplica):
    """One replica, with HTTP, gRPC and Python handles as its frontends."""

    async def __init__(self, arguments: ServeArguments) -> None:  # type: ignore[misc]  # Serve awaits it
        await super().__init__(arguments)
        pace = MessagePace(MESSAGES_PER_S)
        self._grpc = ServeGrpc(self._replica.servicer, pace)
        self._handle = ServeHandle(self._replica.servicer, pace)
        options = arguments.serve
        limits = StoreLimits(
            options.stored_responses, BufferLimits(options.stored_responses_mib * 2**20)
        )
        replica_id = serve.get_replica_context().replica_id
        self._store = ResponseStore(StoredResponses(limits), OtherServeReplicas(replica_id))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the HTTP application; Serve calls this once the replica is ready."""
        servicer = self._replica.servicer
        app = build_http_app(servicer, store=self._store)
        pace = MessagePace(_HTTP_PARTS_PER_S)

        async def serve_leased(scope: Scope, receive: Receive, send: Send) -> None:
            # Messages about the application's lifespan belong to no call.
            call_id = current_call_id() if scope["type"] == "http" else None
            with self._leases.held(call_id), pace.stream() as stream:
                await app(scope, receive_carried(scope, receive), stream.paced(send))

        return serve_leased

    # Named as in the service's definition; Serve passes `grpc_context` by its name.
    async def Generate(  # noqa: N802
        self, request: Incoming, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[Message]:
        async with self._leased(self._grpc.stream("Generate", request, grpc_context)) as messages:
            async for message in messages:
                yield message

    async def Chat(  # noqa: N802
        self, request: Incoming, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[Message]:
        async with self._leased(self._grpc.stream("Chat", request, grpc_context)) as messages:
            async for message in messages:
                yield message

    async def Embed(self, request: Incoming, grpc_context: RayServegRPCContext) -> Message:  # noqa: N802
        return await self._grpc.unary("Embed", request, grpc_context)

    async def Score(self, request: Incoming, grpc_context: RayServegRPCContext) -> Message:  # noqa: N802
        return await self._grpc.unary("Score", request, grpc_context)

    async def Tokenize(self, request: Incoming, grpc_context: RayServegRPCContext) -> Message:  # noqa: N802
        return await self._grpc.unary("Tokenize", request, grpc_context)

    async def Detokenize(self, request: Incoming, grpc_context: RayServegRPCContext) -> Message:  # noqa: N802
        return await self._grpc.unary("Detokenize", request, grpc_context)

    async def Abort(self, request: Incoming, grpc_context: RayServegRPCContext) -> Message:  # noqa: N802
        # The request may run in any replica.
        return await self._grpc.abort(request, grpc_context, self._broadcast_abort)

    async def ListModels(self, request: Incoming, grpc_context: RayServegRPCContext) -> Message:  # noqa: N802
        return await self._grpc.unary("ListModels", request, grpc_context)

    async def GetServerInfo(self, request: Incoming, grpc_context: RayServegRPCContext) -> Message:  # noqa: N802
        return await self._grpc.unary("GetServerInfo", request, grpc_context)

    async def GetLoads(self, request: Incoming, grpc_context: RayServegRPCContext) -> Message:  # noqa: N802
        return await self._grpc.unary("GetLoads", request, grpc_context)

    async def Check(self, request: Incoming, grpc_context: RayServegRPCContext) -> Message:  # noqa: N802
        """Answer grpc.health.v1 for this replica."""
        return self._grpc.health(request, grpc_context)

    async def generate(
        self,
        prompt: Prompt | Sequence[int],
        sampling: SamplingParams | Mapping[str, object] | None = None,
        *,
        model: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        key: str | None = None,
        beam_length_penalty: float | None = None,
        continuation: Continuation | None = None,
    ) -> AsyncGenerator[GenerationOutput]:
        """Yield new tokens of a prompt's completions: `handle.options(stream=True).generate`.

        `key` is an API key, if the deployment requires one. With a `beam_length_penalty`, the `n`
        sequences are the best beams of a search of that width. AffinityRouter sets `continuation`.
        Raises RequestError or EngineError.
        """
        outputs = self._handle.generate(
            prompt,
            sampling,
            model=model,
            request_id=request_id,
            priority=priority,
            timeout_s=timeout_s,
            key=key,
            beam_length_penalty=beam_length_penalty,
            continuation=continuation,
        )
        async with self._leased(outputs):
            async for output in outputs:
                yield output

    async def embed(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
        key: str | None = None,
    ) -> EmbeddingOutput:
        """Return the embeddings of texts. Raises RequestError or EngineError."""
        return await self._handle.embed(
            prompts, dimensions=dimensions, model=model, timeout_s=timeout_s, key=key
        )

    async def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
        key: str | None = None,
    ) -> EmbeddingOutput:
        """Return the relevance of documents to a query, as vectors of one number.

        Raises RequestError or EngineError.
        """
        return await self._handle.score(
            query, documents, instruction=instruction, model=model, timeout_s=timeout_s, key=key
        )

    async def abort(self, request_ids: Sequence[str], *, key: str | None = None) -> None:
        """Abort requests of the key's tenant in all replicas."""
        await self._broadcast_abort(self._handle.tenant_name(key), request_ids)

    async def loads(self, *, key: str | None = None) -> ServerLoads:
        """Return the load of this replica; `handle.broadcast("loads")` asks all of them."""
        return self._handle.loads(key)

    async def abort_here(self, tenant_name: str, request_ids: Sequence[str]) -> None:
        """Abort requests that run in this replica."""
        # Serve also calls a replica that is still loading, which has no requests.
        replica = getattr(self, "_replica", None)
        if replica is None:
            return
        for request_id in request_ids:
            replica.servicer.abort_call(tenant_name, request_id)

    async def kept_response(self, action: Action, tenant: str, response_id: str) -> Kept | None:
        """Serve a stored response to another replica."""
        # Serve also calls a replica that is still loading, which has no responses.
        store = getattr(self, "_store", None)
        return None if store is None else store.answer(action, tenant, response_id)

    async def _broadcast_abort(self, tenant_name: str, request_ids: Sequence[str]) -> None:
        # Serve's own broadcast skips replicas that are draining.
        await self.abort_here(tenant_name, request_ids)
        replica = serve.get_replica_context().replica_id
        await call_others(
            replica.deployment_id,
            {replica.unique_id},
            "abort_here",
            tenant_name,
            list(request_ids),
            timeout_s=_ABORT_WAIT_S,
        )


def build_app(args: Mapping[str, object]) -> Application:
    """Return the application. Raises StartupError for an unknown or invalid argument.

    `model` is a folder or a Hub id; other arguments are fields of EngineOptions and ServeOptions.
    A branch or tag of a model on the Hub is resolved here, so that all replicas load one commit.
    """
    arguments = read_arguments(args)
    engine = replace(arguments.engine, device=arguments.engine.device or _available_device())
    model = pin_model(str(full_name(arguments.model, engine)))
    engine = replace(engine, revision=None, tokenizer=None, tokenizer_revision=None)
    arguments = replace(arguments, engine=engine, model=model)
    return serve.deployment(PagedRay, **deployment_options(arguments)).bind(arguments)  # type: ignore[attr-defined, no-any-return]  # Serve's decorator


# Any: Serve's options have many types.
def deployment_options(arguments: ServeArguments) -> dict[str, Any]:
    """Return the options of the deployment, as Serve takes them."""
    options = arguments.serve
    return {
        "name": "PagedRay",
        "max_ongoing_requests": _NO_LIMIT,
        "graceful_shutdown_timeout_s": options.drain_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 5.0,
        # A replica that hangs is replaced after three of them.
        "health_check_timeout_s": 10.0,
        # A start that failed three times will hardly succeed the twentieth time.
        "max_constructor_retry_count": 3,
        "request_router_config": RequestRouterConfig(
            request_router_class=_ROUTER,  # type: ignore[arg-type]  # the stubs are narrower than the library
            request_router_kwargs={
                "lease_s": options.lease_s,
                "continues_calls": options.continue_calls,
            },
            request_routing_stats_period_s=1.0,  # type: ignore[arg-type]  # the stubs are narrower than the library
        ),
        **_replica_number(options),
        **_placement(arguments.engine, options),
    }


def _replica_number(options: ServeOptions) -> dict[str, Any]:
    if options.max_replicas is None:
        return {"num_replicas": options.num_replicas}
    policy = AutoscalingPolicy(
        policy_function=_POLICY,
        policy_kwargs={
            "target_tokens": options.target_tokens,
            "target_kv_use": options.target_kv_use,
        },
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=options.num_replicas, max_replicas=options.max_replicas, policy=policy
        )
    }


def _placement(engine: EngineOptions, options: ServeOptions) -> dict[str, Any]:
    """Return the resources of a replica, in the first bundle, and of its ranks."""
    rank = {"CPU": 1.0, "GPU": 1.0} if engine.device == "cuda" else {"CPU": 1.0}
    if engine.executor == "local":
        gpus = {"num_gpus": rank["GPU"]} if "GPU" in rank else {}
        return {"ray_actor_options": {"num_cpus": 1, **gpus}}
    return {
        "ray_actor_options": {"num_cpus": 1},
        "placement_group_bundles": [{"CPU": 1.0}, *[rank] * engine.tensor_parallel_size],
        "placement_group_strategy": engine.placement_strategy,
    }


def _available_device() -> Device:
    # This may run on a node without GPUs, so ask the cluster.
    has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    return "cuda" if has_gpus else "cpu"


class OtherServeReplicas:
    """Calls `kept_response` of replicas. It is an OtherReplicas."""

    def __init__(self, own_id: ReplicaID) -> None:
        self._own_id = own_id
        self._actors: dict[str, ActorHandle[Any]] = {}  # Any: as below
        self._lookups = asyncio.Semaphore(_MAX_LOOKUPS)

    @property
    def own_name(self) -> str:
        """The name of this replica."""
        return self._own_id.unique_id

    async def ask(self, replica: str, action: Action, tenant: str, response_id: str) -> Kept | None:
        """Return the answer of another replica; None if it keeps no such response of the tenant.

        Raises LostReplicaError.
        """
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                actor = await self._actor(replica)
                kept = await call_named(actor, "kept_response", action, tenant, response_id)
        # Ray finds no actor of that name, or it has died, hangs or is draining its last call.
        except (RayActorError, TimeoutError, ValueError) as error:
            self._actors.pop(replica, None)
            raise LostReplicaError(replica) from error
        assert kept is None or isinstance(kept, Kept)
        return kept

    async def _actor(self, replica: str) -> ActorHandle[Any]:  # Any: a class that Serve makes
        found = self._actors.get(replica)
        if found is None:
            async with self._lookups:
                found = await asyncio.to_thread(find_replica, self._own_id.deployment_id, replica)
            self._actors[replica] = found
        return found
