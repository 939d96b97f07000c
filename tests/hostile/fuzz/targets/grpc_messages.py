"""Messages of the gRPC frontend, up to the input of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import Message

from cluster.serving.auth import Tenant
from cluster.serving.intake import LARGEST
from cluster.serving.rpc.call import RpcCall
from cluster.serving.rpc.chat import Chat, read_tokenize
from cluster.serving.rpc.requests import parse, read_embedding, read_generation, read_score
from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import SamplingParams
from pagedray.v1 import pagedray_pb2 as pb
from tests.hostile.fuzz.target import Target
from tests.load.request_bodies import protobuf_bodies

if TYPE_CHECKING:
    from cluster.serving.inputs import GenerationInput

_METHODS = ("Generate", "Chat", "Embed", "Score", "Tokenize")
Incoming = TypeVar("Incoming", bound=Message)
_TENANT = Tenant(name="ann")
_CALL = RpcCall()


def run(data: bytes) -> None:
    """Return an input or an InvalidRequestError, for a method that the first byte selects."""
    if not data:
        return
    try:
        _read(_METHODS[data[0] % len(_METHODS)], data[1:])
    except InvalidRequestError:
        return


def _read(method: str, body: bytes) -> None:
    if method == "Generate":
        _check(read_generation(_parsed(pb.GenerateRequest, body), _CALL, _TENANT))
    elif method == "Chat":
        message = _parsed(pb.ChatRequest, body)
        chat = Chat.from_message(message, tool_format="hermes")
        given = chat.to_input(
            _CALL,
            _TENANT,
            LARGEST,
            known_variables=_known_variables,
            note_ignored=_note_ignored,
        )
        _check(given)
    elif method == "Embed":
        read_embedding(_parsed(pb.EmbedRequest, body), _CALL, _TENANT)
    elif method == "Score":
        read_score(_parsed(pb.ScoreRequest, body), _CALL, _TENANT)
    else:
        read_tokenize(
            _parsed(pb.TokenizeRequest, body),
            _TENANT,
            LARGEST,
            known_variables=_known_variables,
            note_ignored=_note_ignored,
        )


def _known_variables(has_tools: bool) -> frozenset[str]:
    return frozenset(("enable_thinking",))


def _note_ignored(name: str) -> None:
    pass


def _parsed(kind: type[Incoming], body: bytes) -> Incoming:
    return parse(kind, body, LARGEST)


def _check(given: GenerationInput) -> None:
    """Raise InvalidRequestError for a value of a parameter, as the validator does."""
    SamplingParams(**{"max_tokens": 1, **given.sampling})  # type: ignore[arg-type]  # checked there


def _seeds() -> tuple[bytes, ...]:
    return tuple(
        bytes([_METHODS.index(method)]) + body
        for kind, bodies in protobuf_bodies("m").items()
        if (method := kind.partition(" ")[0]) in _METHODS
        for body in bodies
    )


TARGET = Target(run=run, seeds=_seeds())
