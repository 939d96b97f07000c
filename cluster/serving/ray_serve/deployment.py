"""PagedRay as a Ray Serve application: `serve run pagedray:build_app model=...`.

A replica of the deployment is a controller with its servicer; its placement group holds the
ranks. HTTP and gRPC reach the servicer in the replica itself, so that no token takes another hop.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from cluster.engine.open_engine import make_executor
from cluster.serving.http_app import build_http_app
from cluster.serving.ray_serve.grpc_frontend import ServeGrpc
from cluster.serving.ray_serve.handle import ServeHandle
from cluster.serving.ray_serve.leases import Leases
from cluster.serving.ray_serve.options import ServeArguments, ServeOptions, read_arguments
from cluster.serving.ray_serve.pace import MESSAGES_PER_S, Pace
from cluster.serving.ray_serve.ray_metrics import RayMetrics
from cluster.serving.ray_serve.replica_calls import call_others, current_call_id
from cluster.serving.ray_serve.replica_engine import ReplicaEngine

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from google.protobuf.message import Message
    from ray.serve import Application
    from ray.serve.grpc_util import RayServegRPCContext
    from ray.util.placement_group import PlacementGroup
    from starlette.types import ASGIApp, Receive, Scope, Send

    from cluster.engine.executor import Executor, ReportProgress
    from cluster.engine.options import EngineOptions
    from cluster.serving.inputs import Prompt
    from cluster.serving.server_info import ServerLoads
    from cluster.serving.servicer import EmbeddingOutput, GenerationOutput
    from pagedray.config import Device, EngineConfig
    from pagedray.request import SamplingParams

    Incoming = Message | bytes

__all__ = ["PagedRay", "build_app", "deployment_options"]

# Admission is the engine's: it knows how many tokens fit, and refuses in time.
_NO_LIMIT = 1_000_000_000
_ROUTER = "cluster.serving.ray_serve.router:AffinityRouter"
# Of HTTP Serve carries more than of other messages, but it takes whatever comes: what it cannot
# carry would pile up.
_HTTP_PARTS_PER_S = 2000.0
# What an Abort waits for replicas that do not answer at once.
_ABORT_WAIT_S = 0.5
_POLICY = "cluster.serving.ray_serve.autoscaling:TokensPolicy"


@serve.ingress()
class PagedRay:
    """One replica, as Ray Serve drives it."""

    @staticmethod
    def make_executor(
        config: EngineConfig, report_progress: ReportProgress, placement: PlacementGroup | None
    ) -> Executor:
        """Return an executor with its ranks loaded. Raises StartupError."""
        return make_executor(config, report_progress, placement)

    async def __init__(self, arguments: ServeArguments) -> None:  # type: ignore[misc]  # Serve awaits it
        self._replica = await ReplicaEngine.started(arguments, self.make_executor)
        self._is_stopped = False
        context = serve.get_replica_context()
        self._metrics = RayMetrics(
            self._replica.servicer.metrics,
            {"deployment": context.deployment, "replica": context.replica_tag},
        )
        self._metrics.start_reports()
        self._leases = Leases(arguments.serve.lease_s)
        pace = Pace(MESSAGES_PER_S)
        self._grpc = ServeGrpc(self._replica.servicer, pace)
        self._handle = ServeHandle(self._replica.servicer, pace)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return what answers HTTP, once the replica is ready."""
        servicer = self._replica.servicer
        app = build_http_app(servicer)
        pace = Pace(_HTTP_PARTS_PER_S)

        async def leased(scope: Scope, receive: Receive, send: Send) -> None:
            # The life of the application is no call.
            call_id = current_call_id() if scope["type"] == "http" else None
            with self._leases.held(call_id), pace.stream() as stream:
                await app(scope, receive, stream.paced(send))

        return leased

    # These are coroutines for Serve to run them on the servicer's event loop.
    async def check_health(self) -> None:
        """Raise EngineError unless the engine makes progress or has none to make."""
        self._replica.check_progress()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what TokensPolicy decides by."""
        return self._replica.current_load().metrics()

    async def record_routing_stats(self) -> dict[str, float]:
        """Return what AffinityRouter decides by."""
        return self._replica.routing_stats()

    # The names of these are the service's; Serve looks for `grpc_context` by its name.
    async def Generate(  # noqa: N802
        self, request: Incoming, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[Message]:
        with self._leases.held(current_call_id()):
            async with aclosing(self._grpc.stream("Generate", request, grpc_context)) as messages:
                async for message in messages:
                    yield message

    async def Chat(  # noqa: N802
        self, request: Incoming, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[Message]:
        with self._leases.held(current_call_id()):
            async with aclosing(self._grpc.stream("Chat", request, grpc_context)) as messages:
                async for message in messages:
                    yield message

    async def Embed(  # noqa: N802
        self, request: Incoming, grpc_context: RayServegRPCContext
    ) -> Message:
        return await self._grpc.unary("Embed", request, grpc_context)

    async def Tokenize(  # noqa: N802
        self, request: Incoming, grpc_context: RayServegRPCContext
    ) -> Message:
        return await self._grpc.unary("Tokenize", request, grpc_context)

    async def Detokenize(  # noqa: N802
        self, request: Incoming, grpc_context: RayServegRPCContext
    ) -> Message:
        return await self._grpc.unary("Detokenize", request, grpc_context)

    async def Abort(  # noqa: N802
        self, request: Incoming, grpc_context: RayServegRPCContext
    ) -> Message:
        # A request may run in any replica.
        return await self._grpc.abort(request, grpc_context, self._broadcast_abort)

    async def ListModels(  # noqa: N802
        self, request: Incoming, grpc_context: RayServegRPCContext
    ) -> Message:
        return await self._grpc.unary("ListModels", request, grpc_context)

    async def GetServerInfo(  # noqa: N802
        self, request: Incoming, grpc_context: RayServegRPCContext
    ) -> Message:
        return await self._grpc.unary("GetServerInfo", request, grpc_context)

    async def GetLoads(  # noqa: N802
        self, request: Incoming, grpc_context: RayServegRPCContext
    ) -> Message:
        return await self._grpc.unary("GetLoads", request, grpc_context)

    async def Check(self, request: Incoming) -> Message:  # noqa: N802
        """Answer grpc.health.v1 for the replica that the call came to."""
        return self._grpc.health()

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
    ) -> AsyncGenerator[GenerationOutput]:
        """Yield what the continuations of a prompt gain: `handle.options(stream=True).generate`.

        `key` is the tenant's, where keys are asked for. Raises RequestError or EngineError.
        """
        outputs = self._handle.generate(
            prompt,
            sampling,
            model=model,
            request_id=request_id,
            priority=priority,
            timeout_s=timeout_s,
            key=key,
        )
        with self._leases.held(current_call_id()):
            async with aclosing(outputs):
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
        """Return the vectors of texts. Raises RequestError or EngineError."""
        return await self._handle.embed(
            prompts, dimensions=dimensions, model=model, timeout_s=timeout_s, key=key
        )

    async def abort(self, request_ids: Sequence[str], *, key: str | None = None) -> None:
        """End requests of the key's tenant, in whatever replica they run."""
        await self._broadcast_abort(self._handle.tenant_name(key), request_ids)

    async def loads(self, *, key: str | None = None) -> ServerLoads:
        """Return what this replica has to do; `handle.broadcast("loads")` asks all of them."""
        return self._handle.loads(key)

    async def abort_here(self, tenant_name: str, request_ids: Sequence[str]) -> None:
        """End requests that run in this replica."""
        for request_id in request_ids:
            self._replica.servicer.abort_call(tenant_name, request_id)

    async def renew(self, call_ids: Sequence[str]) -> None:
        """Let calls of this replica run on, by the ids that Serve gave them."""
        self._leases.renew(frozenset(call_ids))

    async def _broadcast_abort(self, tenant_name: str, request_ids: Sequence[str]) -> None:
        # A replica that is to stop may have it, of which Serve's own broadcast knows nothing.
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

    async def __del__(self) -> None:
        """End the engine; Serve calls it when requests have ended or may run no longer."""
        if hasattr(self, "_replica") and not self._is_stopped:
            self._is_stopped = True
            await self._metrics.stop_reports()
            await self._replica.close()


def build_app(args: Mapping[str, object]) -> Application:
    """Return the application: `model` is a folder, the others are fields of EngineOptions and
    ServeOptions. Raises StartupError for an argument that is unknown or wrong.
    """
    arguments = read_arguments(args)
    engine = replace(arguments.engine, device=arguments.engine.device or _device_at_hand())
    arguments = replace(arguments, engine=engine)
    return serve.deployment(PagedRay, **deployment_options(arguments)).bind(arguments)  # type: ignore[attr-defined, no-any-return]  # Serve's decorator


# Any: what Serve takes is of many types.
def deployment_options(arguments: ServeArguments) -> dict[str, Any]:
    """Return what Serve is to know of the deployment."""
    options = arguments.serve
    return {
        "name": "PagedRay",
        "max_ongoing_requests": _NO_LIMIT,
        "graceful_shutdown_timeout_s": options.drain_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 5.0,
        "health_check_timeout_s": 30.0,
        # What cannot start now will hardly start the twentieth time.
        "max_constructor_retry_count": 3,
        "request_router_config": RequestRouterConfig(
            request_router_class=_ROUTER,  # type: ignore[arg-type]  # the stubs are narrower than the library
            request_router_kwargs={"lease_s": options.lease_s},
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
    """Return what a replica and its ranks take: the replica is in the first bundle."""
    rank = {"CPU": 1.0, "GPU": 1.0} if engine.device == "cuda" else {"CPU": 1.0}
    if engine.executor == "local":
        gpus = {"num_gpus": rank["GPU"]} if "GPU" in rank else {}
        return {"ray_actor_options": {"num_cpus": 1, **gpus}}
    return {
        "ray_actor_options": {"num_cpus": 1},
        "placement_group_bundles": [{"CPU": 1.0}, *[rank] * engine.tensor_parallel_size],
        "placement_group_strategy": engine.placement_strategy,
    }


def _device_at_hand() -> Device:
    # This may run on a node without GPUs: what counts is what the cluster has.
    has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    return "cuda" if has_gpus else "cpu"
