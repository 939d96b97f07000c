"""Frontends of Ray Serve reject the same requests as all others, and count each once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc.status_pb2 import Status
from msgspec.structs import replace

import pagedray
from cluster.llm.sampling_params import RequestOutputKind
from cluster.serving.auth import Authenticator, digest_of, new_key
from cluster.serving.ray_serve.grpc_frontend import ServeGrpc
from cluster.serving.ray_serve.handle import ServeHandle
from cluster.serving.ray_serve.options import MessagePace
from cluster.serving.ray_serve.proxied_call import TIMEOUT_KEY
from cluster.serving.text.template_arguments import ChatPrompt
from pagedray.errors import AuthenticationError, InvalidRequestError, PagedRayError
from pagedray.sampling_params import SamplingParams
from pagedray.v1 import pagedray_pb2 as pb
from tests.serving.grpc_frontend import grpc_frontend
from tests.serving.rejections.test_rejected_cases import CASES, Case

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from cluster.serving.generation_call import GenerationOutput
    from cluster.serving.servicer import Servicer
    from cluster.serving.text.tokenizer import Tokenizer
    from tests.serving.conftest import Server

PACE = MessagePace(1e6)


class Context:
    """A call through Serve's proxy as its replica sees it."""

    def __init__(self, metadata: Mapping[str, str]) -> None:
        self._metadata = list(metadata.items())
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.trailing: dict[str, bytes] = {}

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailing: list[tuple[str, bytes]]) -> None:
        self.trailing = dict(trailing)


# Any: messages or outputs.
def collect(server: Server, items: AsyncIterator[Any]) -> list[Any]:
    async def run() -> list[Any]:
        return [item async for item in items]

    return asyncio.run_coroutine_threadsafe(run(), server.loop).result(60)


def stream(server: Server, message: pb.GenerateRequest, **metadata: str) -> tuple[Any, Context]:
    context = Context(metadata)
    service = ServeGrpc(server.frontends.servicer, PACE)
    # The context is a stand-in for Serve's.
    messages = service.stream("Generate", message.SerializeToString(), context)  # type: ignore[arg-type]
    return collect(server, messages), context


def generate(server: Server, case: Case) -> list[GenerationOutput]:
    handle = ServeHandle(server.frontends.servicer, PACE)
    outputs = handle.generate(
        case.prompt,
        case.sampling,
        model=None,
        request_id=case.client_id or None,
        priority=0,
        timeout_s=None,
        key=None,
        beam_length_penalty=None,
    )
    return collect(server, outputs)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_handle_rejects_with_the_same_words(server: Server, case: Case) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        generate(server, case)
    assert str(caught.value) == case.text
    assert server.engine.log.submitted == []


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_proxy_gets_the_status_of_rejections_and_nothing_is_raised(
    server: Server, case: Case
) -> None:
    messages, context = stream(server, case.grpc_message())
    assert [one.SerializeToString() for one in messages] == [b""]
    assert (context.code, context.details) == (grpc.StatusCode.INVALID_ARGUMENT, case.text)
    status = Status.FromString(context.trailing["grpc-status-details-bin"])
    assert status.message == case.text
    assert server.engine.log.submitted == []


def test_valid_requests_give_the_results_of_other_frontends(server: Server) -> None:
    sampling = {"max_tokens": 30, "ignore_eos": True}
    outputs = generate(server, Case("", "", prompt="hello", sampling=sampling))
    request = pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(**sampling))  # type: ignore[arg-type]  # the stubs are narrower than the library
    messages, context = stream(server, request)
    assert context.code is None
    texts = [
        "".join(sequence.text for one in answers for sequence in one.sequences)
        for answers in (outputs, messages)
    ]
    assert texts[0] == texts[1] != ""
    assert messages[-1].usage.num_generated_tokens == 30


def test_a_handle_takes_the_parameters_of_the_python_api(server: Server) -> None:
    # Any: `Case` has dictionaries.
    params: Any = pagedray.SamplingParams(
        max_tokens=None, stop="x", skip_special_tokens=False, include_stop_str_in_output=True
    )
    outputs = generate(server, Case("", "", prompt="hello", sampling=params))
    asked = pb.SamplingParams(stop=["x"], skip_special_tokens=False, include_stop=True)
    messages, context = stream(server, pb.GenerateRequest(text="hello", sampling=asked))
    assert context.code is None
    texts = [
        "".join(sequence.text for one in answers for sequence in one.sequences)
        for answers in (outputs, messages)
    ]
    assert texts[0] == texts[1] != ""
    first, second = (replace(one.sampling, seed=None) for one in server.engine.log.submitted)
    assert first == second


def test_beams_of_a_handle_are_those_of_the_proxy(server: Server) -> None:
    sampling = SamplingParams(n=2, max_tokens=4, logprobs=0)
    handle = ServeHandle(server.frontends.servicer, PACE)
    outputs = collect(
        server,
        handle.generate(
            "hello",
            sampling,
            model=None,
            request_id=None,
            priority=0,
            timeout_s=None,
            key=None,
            beam_length_penalty=2.0,
        ),
    )
    beams = pb.BeamSearch(length_penalty=2.0)
    asked = pb.SamplingParams(n=2, max_tokens=4, logprobs=0, beam_search=beams)
    messages, context = stream(server, pb.GenerateRequest(text="hello", sampling=asked))
    assert context.code is None
    found = [
        [tuple(one.token_ids) for answer in answers for one in answer.sequences if one.token_ids]
        for answers in (outputs, messages)
    ]
    assert found[0] == found[1]
    assert len(set(found[0])) == 2


def test_the_proxy_passes_the_deadline_on(server: Server) -> None:
    server.engine.is_paused = True
    message = pb.GenerateRequest(text="hello")
    messages, context = stream(server, message, **{TIMEOUT_KEY: "50"})
    assert context.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"prompt": 5}, "prompt must be a string, token ids or a ChatPrompt, not int."),
        ({"prompt": [True]}, "prompt must be a string, token ids or a ChatPrompt, not list."),
        (
            {"sampling": {"max_token": 5}},
            "Unknown sampling parameter 'max_token'; did you mean max_tokens?",
        ),
        ({"sampling": 5}, "sampling must be SamplingParams or a dictionary, not int."),
        ({"sampling": "n"}, "sampling must be SamplingParams or a dictionary, not str."),
        (
            {"sampling": {"skip_special_tokens": "no"}},
            "skip_special_tokens must be true or false, not 'no'.",
        ),
        (
            {"sampling": pagedray.SamplingParams(detokenize=False)},
            "detokenize = False is not supported: outputs of a handle have the text and tokens "
            "since the previous one.",
        ),
        (
            {"sampling": pagedray.SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)},
            "output_kind = 2 is not supported: outputs of a handle have the text and tokens "
            "since the previous one.",
        ),
        ({"model": 5}, "model must be a string, not 5."),
        ({"request_id": b"x"}, "request_id must be a string, not b'x'."),
        ({"timeout_s": True}, "timeout_s must be in (0, 86400], not True."),
        ({"beam_length_penalty": True}, "beam_length_penalty must be from -10 to 10, not True."),
        ({"priority": "high"}, "priority must be an integer, not 'high'."),
        ({"timeout_s": 0}, "timeout_s must be in (0, 86400], not 0."),
        (
            {"timeout_s": float("nan")},
            "timeout_s must be in (0, 86400], not nan.",
        ),
        ({"beam_length_penalty": 11}, "beam_length_penalty must be from -10 to 10, not 11."),
        (
            {"beam_length_penalty": 1, "sampling": {"stop": ("x",)}},
            "stop cannot be combined with beam_length_penalty.",
        ),
    ],
)
def test_a_handle_checks_types(
    server: Server,
    arguments: dict[str, Any],  # Any: arguments of all types
    text: str,
) -> None:
    good: dict[str, Any] = {"prompt": "x", "sampling": None, "model": None, "request_id": None}
    good |= {"priority": 0, "timeout_s": None, "key": None, "beam_length_penalty": None}
    outputs = ServeHandle(server.frontends.servicer, PACE).generate(**(good | arguments))
    with pytest.raises(InvalidRequestError) as caught:
        collect(server, outputs)
    assert str(caught.value) == text


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
