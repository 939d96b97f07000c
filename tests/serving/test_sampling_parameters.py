"""Every sampling parameter can be set over every API that generates text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedray.sampling_params import SamplingParams
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc

if TYPE_CHECKING:
    import httpx

    from tests.serving.fake_engine import FakeEngine

Stub = pagedray_pb2_grpc.GenerationServiceStub
PAGE = Path(__file__).parents[2] / "cluster" / "serving" / "admin" / "web" / "index.html"
GIVEN: dict[str, Any] = {  # Any: fields of several types
    "n": 2,
    "max_tokens": 3,
    "min_tokens": 1,
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {7: 1.5},
    "allowed_token_ids": (5, 6),
    "bad_words": ("fox",),
    "seed": 4,
    "stop": ("zz",),
    "stop_token_ids": (8,),
    "ignore_eos": True,
    "logprobs": 2,
    "logprob_token_ids": (9,),
    "prompt_logprobs": 1,
}
ON_THE_PAGE = GIVEN.keys() - {"n", "logprobs", "logprob_token_ids", "prompt_logprobs", "max_tokens"}
"""Parameters of one answer that the page shows; its `max_tokens` has the name of chats."""


def test_all_parameters_are_tested() -> None:
    # Both need a conversation or a grammar, and have tests of their own.
    others = {"structure", "thinking_token_budget"}
    assert GIVEN.keys() | others == set(SamplingParams.__struct_fields__)


def submitted_to(engine: FakeEngine) -> dict[str, Any]:  # Any: as above
    [request] = engine.log.submitted
    return {name: getattr(request.sampling, name) for name in GIVEN}


def test_parameters_are_set_over_http(http: httpx.Client, engine: FakeEngine) -> None:
    answer = http.post("/v1/completions", json={"model": "tiny", "prompt": "x", **GIVEN})
    assert answer.status_code == 200, answer.text
    assert submitted_to(engine) == GIVEN


def test_parameters_are_set_over_grpc(stub: Stub, engine: FakeEngine) -> None:
    list(stub.Generate(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(**GIVEN))))
    assert submitted_to(engine) == GIVEN


def test_page_has_a_field_for_each_parameter_of_an_answer() -> None:
    assert set(re.findall(r'name="(\w+)"', PAGE.read_text())) >= ON_THE_PAGE
