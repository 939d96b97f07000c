"""Rejections over Ray Serve are counted once each, under their frontend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cluster.serving.auth import Authenticator, digest_of, new_key
from cluster.serving.ray_serve.grpc_frontend import ServeGrpc
from cluster.serving.ray_serve.handle import ServeHandle
from cluster.serving.ray_serve.options import MessagePace
from cluster.serving.text.templates.chat_prompt import ChatPrompt
from pagedray.errors import AuthenticationError, InvalidRequestError, PagedRayError
from pagedray.v1 import pagedray_pb2 as pb
from tests.serving.grpc_frontend import grpc_frontend
from tests.serving.ray_serve.test_frontends import Context

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from cluster.serving.servicer import Servicer
    from cluster.serving.text.tokenizer import Tokenizer

KEY = new_key()


@pytest.fixture
async def servicer(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Servicer]:
    path = tmp_path / "keys.toml"
    path.touch(mode=0o600)
    path.write_text(f'[tenants.red]\nkeys = ["sha256:{digest_of(KEY).hex()}"]\n')
    async with grpc_frontend(tokenizer, authenticator=Authenticator(path)) as frontend:
        yield frontend.servicer


def counted(servicer: Servicer) -> dict[str, float]:
    """Return the number of rejected calls by frontend and reason."""
    return {
        f"{sample.labels['frontend']} {sample.labels['reason']}": sample.value
        for family in servicer.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "pagedray_rejections_total"
    }


@pytest.mark.parametrize(
    ("method", "message", "key", "reason"),
    [
        ("Generate", b"\xff", KEY, "invalid"),
        ("Generate", pb.GenerateRequest(text=""), KEY, "invalid"),
        ("Generate", pb.GenerateRequest(text="x"), "wrong", "unauthenticated"),
        ("Generate", pb.GenerateRequest(text="x", resumable=True), KEY, "invalid"),
        ("Generate", pb.GenerateRequest(request_id="x", resume_from=1), KEY, "invalid"),
        ("Chat", b"\xff", KEY, "invalid"),
        ("Chat", b"", "wrong", "unauthenticated"),
        ("Embed", b"\xff", KEY, "invalid"),
        ("Embed", b"", "wrong", "unauthenticated"),
        ("Score", pb.ScoreRequest(query="x", documents=[""]), KEY, "invalid"),
        ("Score", b"", "wrong", "unauthenticated"),
        ("Tokenize", b"\xff", KEY, "invalid"),
        ("ListModels", b"", "wrong", "unauthenticated"),
        ("Abort", b"\xff", KEY, "invalid"),
        ("Abort", b"", "wrong", "unauthenticated"),
    ],
)
async def test_rejections_of_serves_grpc_are_counted(
    servicer: Servicer,
    method: str,
    message: Any,  # Any: bytes or one of several messages
    key: str,
    reason: str,
) -> None:
    context: Any = Context({"authorization": f"Bearer {key}"})  # Any: stands in for Serve's
    service = ServeGrpc(servicer, MessagePace(1e6))

    async def tell_others(_tenant: str, _ids: object) -> None:
        raise AssertionError

    if method in ("Generate", "Chat"):
        assert [one async for one in service.stream(method, message, context)]
    elif method == "Abort":
        await service.abort(message, context, tell_others)
    else:
        await service.unary(method, message, context)
    assert context.code is not None
    assert counted(servicer) == {f"ray {reason}": 1}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"key": "wrong"}, "unauthenticated"),
        ({"prompt": 5}, "invalid"),
        ({"prompt": ""}, "invalid"),
        ({"timeout_s": -1}, "invalid"),
        ({"model": "other"}, "unknown_model"),
    ],
)
async def test_rejections_of_a_handles_generate_are_counted(
    servicer: Servicer,
    arguments: dict[str, Any],  # Any: arguments of all types
    reason: str,
) -> None:
    given: dict[str, Any] = {"prompt": "x", "sampling": None, "model": None, "request_id": None}
    given |= {"priority": 0, "timeout_s": None, "key": KEY} | arguments
    with pytest.raises(PagedRayError):
        async for _ in ServeHandle(servicer, MessagePace(1e6)).generate(**given):
            pass
    assert counted(servicer) == {f"ray {reason}": 1}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"key": "wrong"}, "unauthenticated"),
        ({"prompts": "one text"}, "invalid"),
        ({"prompts": None}, "invalid"),
        ({"prompts": ["x", 5]}, "invalid"),
        ({"prompts": ["x", ChatPrompt(())]}, "invalid"),
        ({"timeout_s": -1}, "invalid"),
    ],
)
async def test_rejections_of_a_handles_embed_are_counted(
    servicer: Servicer,
    arguments: dict[str, Any],  # Any: arguments of all types
    reason: str,
) -> None:
    given: dict[str, Any] = {"prompts": ["x"], "dimensions": None, "model": None}
    given |= {"timeout_s": None, "key": KEY} | arguments
    with pytest.raises(PagedRayError):
        await ServeHandle(servicer, MessagePace(1e6)).embed(**given)
    assert counted(servicer) == {f"ray {reason}": 1}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"key": "wrong"}, "unauthenticated"),
        ({"query": ""}, "invalid"),
        ({"query": 5}, "invalid"),
        ({"documents": "one text"}, "invalid"),
        ({"documents": ["x", ""]}, "invalid"),
        ({"timeout_s": -1}, "invalid"),
    ],
)
async def test_rejections_of_a_handles_score_are_counted(
    servicer: Servicer,
    arguments: dict[str, Any],  # Any: arguments of all types
    reason: str,
) -> None:
    given: dict[str, Any] = {"query": "x", "documents": ["y"], "instruction": None, "model": None}
    given |= {"timeout_s": None, "key": KEY} | arguments
    with pytest.raises(PagedRayError):
        await ServeHandle(servicer, MessagePace(1e6)).score(**given)
    assert counted(servicer) == {f"ray {reason}": 1}


@pytest.mark.parametrize(
    ("method", "name", "wrong"),
    [
        ("embed", "prompts", {"x": 1}),
        ("embed", "dimensions", "8"),
        ("embed", "model", 5),
        ("score", "instruction", 5),
        ("score", "model", 5),
    ],
)
async def test_arguments_of_a_wrong_type_are_named(
    servicer: Servicer,
    method: str,
    name: str,
    wrong: Any,  # Any: what is wrong
) -> None:
    given: dict[str, Any] = {"model": None, "timeout_s": None, "key": KEY}
    given |= (
        {"prompts": ["x"], "dimensions": None}
        if method == "embed"
        else {"query": "x", "documents": ["y"], "instruction": None}
    )
    with pytest.raises(InvalidRequestError, match=f"^{name} must be a") as caught:
        await getattr(ServeHandle(servicer, MessagePace(1e6)), method)(**(given | {name: wrong}))
    assert caught.value.param == name


async def test_calls_of_a_handle_without_a_valid_key_are_counted(servicer: Servicer) -> None:
    handle = ServeHandle(servicer, MessagePace(1e6))
    for ask in (handle.loads, handle.tenant_name):
        with pytest.raises(AuthenticationError):
            ask("wrong")
        ask(KEY)
    assert counted(servicer) == {"ray unauthenticated": 2}
