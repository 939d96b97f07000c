"""The frontends that are measured, and the clients of each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.frontend_server import MODEL_NAME, TOKEN_TEXT
from bench.frontends.clients import EventClients, GrpcClients
from pagedray.v1 import pagedray_pb2 as pb

if TYPE_CHECKING:
    from bench.frontends.clients import StreamClients
    from bench.frontends.token_counter import TokenCounter

__all__ = ["KINDS", "NUM_STREAMS", "SERVE_KINDS", "Kind", "open_clients"]

NUM_STREAMS = 64
_MOST_TOKENS = 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A frontend as clients see it."""

    name: str
    is_grpc: bool
    path: str
    target: float
    shares_connection: bool = True

    def connections(self, num_streams: int) -> int:
        """Return how many connections this many streams have."""
        return 1 if self.is_grpc and self.shares_connection else num_streams


KINDS = (
    Kind(name="gRPC Generate", is_grpc=True, path="Generate", target=20_000),
    Kind(
        name="gRPC Generate",
        is_grpc=True,
        path="Generate",
        target=20_000,
        shares_connection=False,
    ),
    Kind(name="gRPC Chat", is_grpc=True, path="Chat", target=20_000),
    Kind(name="SSE completions", is_grpc=False, path="/v1/completions", target=15_000),
    Kind(name="SSE chat", is_grpc=False, path="/v1/chat/completions", target=15_000),
)
SERVE_KINDS = (
    Kind(name="Ray Serve SSE", is_grpc=False, path="/v1/completions", target=5_000),
    Kind(name="Ray Serve gRPC", is_grpc=True, path="Generate", target=5_000),
)


def open_clients(
    kind: Kind, port: int, num_streams: int, counter: TokenCounter, *, model: str = MODEL_NAME
) -> StreamClients:
    """Return clients whose streams have been requested."""
    if kind.is_grpc:
        sampling = pb.SamplingParams(max_tokens=_MOST_TOKENS, ignore_eos=True)
        turn = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="x")
        message = (
            pb.GenerateRequest(text="x", sampling=sampling)
            if kind.path == "Generate"
            else pb.ChatRequest(messages=[turn], sampling=sampling)
        )
        return GrpcClients(
            port,
            counter,
            num_streams=num_streams,
            num_connections=kind.connections(num_streams),
            path=f"/pagedray.v1.GenerationService/{kind.path}",
            message=message.SerializeToString(),
            token_text=TOKEN_TEXT,
        )
    prompt = (
        {"prompt": "x"}
        if kind.path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "x"}]}
    )
    body = {
        "model": model,
        "stream": True,
        "max_tokens": _MOST_TOKENS,
        "ignore_eos": True,
        **prompt,
    }
    return EventClients(
        port,
        counter,
        num_streams=num_streams,
        path=kind.path,
        body=json.dumps(body).encode(),
        token_text=TOKEN_TEXT,
    )
