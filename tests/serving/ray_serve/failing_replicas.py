"""Replicas that fail at chosen messages, behind the real extensions of Serve's proxies.

Each replica is a real servicer with real frontends over a fake engine. The stand-in for Serve
pickles what it carries and ends responses as Serve does when a replica fails.
"""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, get_args

import grpc

from cluster.serving.engine_client import EngineClient
from cluster.serving.http_app import build_http_app
from cluster.serving.ray_serve.grpc_frontend import ServeGrpc
from cluster.serving.ray_serve.grpc_proxy import add_services
from cluster.serving.ray_serve.http_proxy import ReplicaGuard
from cluster.serving.ray_serve.options import MessagePace
from cluster.serving.ray_serve.proxied_call import ProxiedCall, current_call, receive_carried
from cluster.serving.responses.stored_responses import (
    LostReplicaError,
    ResponseStore,
    StoredResponses,
    StoreLimits,
)
from cluster.serving.servicer import Servicer
from pagedray.errors import EngineError
from tests.serving.conftest import engine_config
from tests.serving.fake_engine import FakeEngine

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncGenerator, Callable, Sequence

    from starlette.types import Message, Receive, Scope, Send

    from cluster.serving.responses.stored_responses import Action, Kept
    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.request import Request

__all__ = ["Cut", "FailingReplicas", "Failure", "Replica", "reset", "some_cuts"]

Failure = Literal["died", "hung", "silent end", "cancelled", "engine"]
Cut = tuple[int, Failure | Literal["time limit"]]
"""The number of messages that pass before a replica fails, and how it fails.

"time limit" is Serve's own: over HTTP, Serve cancels the call and ends a stream without a message,
or a call without a response with a text.
"""


class Neighbors:
    """The other replicas, as one of them sees them. An OtherReplicas."""

    def __init__(self, own_name: str, stores: dict[str, ResponseStore]) -> None:
        self.own_name = own_name
        self._stores = stores

    async def ask(self, replica: str, action: Action, tenant: str, response_id: str) -> Kept | None:
        """Answer as the replica does; one that is not in `stores` has ended."""
        if replica not in self._stores:
            raise LostReplicaError
        answer = self._stores[replica].answer(action, tenant, response_id)
        found: Kept | None = pickle.loads(pickle.dumps(answer))
        return found


class Replica:
    """One replica."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Callable[[Request, int], list[int]],
        *,
        name: str = "one",
        stores: dict[str, ResponseStore] | None = None,
    ) -> None:
        """`stores` are those of all replicas by their names, to which its own is added."""
        self.name = name
        stores = {} if stores is None else stores
        store = ResponseStore(StoredResponses(StoreLimits()), Neighbors(name, stores))
        stores[name] = store
        client = EngineClient(asyncio.get_running_loop())
        self.engine = FakeEngine(client, script)
        self.engine.num_cached_tokens = 3
        client.attach_engine(self.engine)
        self.servicer = Servicer(client, tokenizer, engine_config(context=2048))
        self.servicer.set_ready()
        self.grpc = ServeGrpc(self.servicer, MessagePace(1e6))
        self.http = build_http_app(self.servicer, store=store)

    async def close(self) -> None:
        """Stop the engine and the servicer."""
        self.engine.stop()
        await self.servicer.close()


class FailingReplicas:
    """Serve with several replicas: a call and each continuation of it go to the next one."""

    def __init__(self, replicas: Sequence[Replica], *, may_continue: bool = True) -> None:
        self._replicas = replicas
        self._may_continue = may_continue
        self.cuts: list[Cut] = []
        """How the replicas of the next call fail, one after another; the last one does not."""
        self.num_lost_bodies = 0
        """How many of the next HTTP requests never get the messages of their bodies."""
        self.num_sent = 0
        self._handlers: list[Any] = []  # Any: grpc's handlers
        add_services(object(), SimpleNamespace(add_generic_rpc_handlers=self._take))  # type: ignore[arg-type]  # a stand-in for a server
        self.http = ReplicaGuard(self._serve_http)

    def grpc(self, method: str) -> Any:  # Any: the library's handler
        """Return the handler of a method."""
        found = self._handlers[0].service(
            SimpleNamespace(method=f"/pagedray.v1.GenerationService/{method}")
        )
        return found.stream_stream

    def _take(self, handlers: tuple[Any, ...]) -> None:  # Any: see above
        for one in handlers:
            for name, handler in one._method_handlers.items():
                one._method_handlers[name] = (
                    grpc.unary_stream_rpc_method_handler(self._stream(name))
                    if handler.response_streaming
                    else grpc.unary_unary_rpc_method_handler(self._unary(name))
                )
            self._handlers.append(one)

    def _route(self) -> tuple[Replica, ProxiedCall, Cut | None]:
        call = current_call()
        assert call is not None
        replica = self._replicas[self.num_sent % len(self._replicas)]
        self.num_sent += 1
        call.note_sent(replica.name, may_continue=self._may_continue)
        call.note_accepted()
        return replica, call, self.cuts.pop(0) if self.cuts else None

    def _stream(self, name: str) -> Any:  # Any: see above
        # Any: the request and the context are what the extension passes to Serve.
        async def handle(request: Any, context: Any) -> AsyncGenerator[bytes]:
            replica, call, cut = self._route()
            method = name.rpartition("/")[2]
            carried = pickle.loads(pickle.dumps(request))
            messages = replica.grpc.stream(method, carried, context)
            try:
                num_passed = 0
                async for message in _until_failure(messages, cut, replica):
                    num_passed += 1
                    yield message.SerializeToString()
            except asyncio.CancelledError:
                # As Ray reports a task that was cancelled in its replica.
                _end(context, call, "cancelled")
                return
            else:
                if cut is not None and num_passed == cut[0]:
                    _end(context, call, cut[1])
            finally:
                await messages.aclose()

        return handle

    def _unary(self, name: str) -> Any:  # Any: see above
        async def handle(request: bytes, context: Any) -> bytes:  # Any: see above
            replica, call, cut = self._route()
            if cut is not None:
                _end(context, call, cut[1])
                return b""
            answer = await replica.grpc.unary(name.rpartition("/")[2], request, context)
            return answer.SerializeToString()

        return handle

    async def _serve_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        replica, call, cut = self._route()
        left = asyncio.Event()
        num_passed = 0

        async def send_some(message: Message) -> None:
            nonlocal num_passed
            if cut is not None and num_passed == cut[0]:
                if cut[1] == "engine":
                    if replica.engine.error is None:
                        replica.engine.fail_all(EngineError("The engine failed."))
                else:
                    left.set()
                    await asyncio.Event().wait()
            num_passed += 1
            await send(pickle.loads(pickle.dumps(message)))

        if self.num_lost_bodies:
            self.num_lost_bodies -= 1
            receive = _losing(receive)
        carried = pickle.loads(pickle.dumps(scope))
        receive = receive_carried(carried, receive)
        serving = asyncio.create_task(replica.http(carried, receive, send_some))
        leaving = asyncio.create_task(left.wait())
        await asyncio.wait((serving, leaving), return_when=asyncio.FIRST_COMPLETED)
        if left.is_set():
            if cut is not None and cut[1] == "hung":
                call.note_hung()
            if cut is not None and cut[1] == "time limit":
                call.note_cancelled()
                if not num_passed:
                    headers = [(b"content-type", b"text/plain")]
                    await send({"type": "http.response.start", "status": 408, "headers": headers})
                    await send({"type": "http.response.body", "body": b"Request x timed out."})
            if cut is not None and cut[1] == "silent end":
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            serving.cancel()
        leaving.cancel()
        await asyncio.gather(serving, leaving, return_exceptions=True)


def _losing(receive: Receive) -> Receive:
    """Return a `receive` that never returns, though the messages are taken, as Serve does it."""

    async def receive_nothing() -> Message:
        while True:
            await receive()

    return receive_nothing


async def _until_failure(
    messages: AsyncGenerator[Any], cut: Cut | None, replica: Replica
) -> AsyncGenerator[Any]:  # Any: protobuf messages
    num_passed = 0
    async for message in messages:
        if cut is not None and num_passed == cut[0]:
            if cut[1] != "engine":
                return
            if replica.engine.error is None:
                replica.engine.fail_all(EngineError("The engine failed."))
        num_passed += 1
        yield message


def _end(context: Any, call: ProxiedCall, failure: str) -> None:  # Any: see above
    """Set the status that Serve's proxy sets after a failure."""
    if failure == "hung":
        call.note_hung()
    if failure in ("died", "hung"):
        context.set_code(grpc.StatusCode.INTERNAL)
        context.set_details("The actor died unexpectedly: a trace")
    elif failure == "cancelled":
        context.set_code(grpc.StatusCode.CANCELLED)
        context.set_details("Client for request x disconnected.")


def some_cuts(chance: random.Random, most: int) -> list[Cut]:
    """Return one to three failures of replicas, each after fewer than `most` messages."""
    failures: tuple[Failure, ...] = get_args(Failure)
    return [
        (chance.randrange(most), chance.choice(failures)) for _ in range(chance.randrange(1, 4))
    ]


def reset(replicas: list[Replica]) -> None:
    """Forget what replicas were sent, so that they answer as new ones do."""
    for one in replicas:
        one.engine.reset()
        one.engine.num_cached_tokens = 3
