"""`logprob_token_ids` gives what transformers computes, over each API that has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest
import torch
import transformers

from pagedray import LLM, SamplingParams
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.system.server_process import TINY_LLAMA, ServerProcess

TEXT = "def read_config(path):\n"
TOKEN_IDS = [3000, 17, 5, 1024]
NAMES = [f"token_id:{token_id}" for token_id in TOKEN_IDS]
GIVEN = {"logprob_token_ids": TOKEN_IDS, "return_tokens_as_token_ids": True}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(("--executor=local", "--device=cpu", "--dtype=float32")) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def truth() -> list[float]:
    """The log-probabilities of the tokens behind the text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_LLAMA)
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer(TEXT).input_ids])).logits[0, -1]
    found: list[float] = logits.double().log_softmax(-1)[TOKEN_IDS].tolist()
    return found


def test_completions_report_the_tokens(client: openai.OpenAI, truth: list[float]) -> None:
    answer = client.completions.create(
        model="tiny-llama", prompt=TEXT, max_tokens=2, temperature=0, logprobs=1, extra_body=GIVEN
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.tokens is not None
    for sampled, reported in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
        assert reported.keys() == {*NAMES, sampled}
    first = logprobs.top_logprobs[0]
    assert [first[name] for name in NAMES] == pytest.approx(truth, abs=1e-3)


@pytest.mark.parametrize("is_stream", [False, True])
def test_chat_reports_the_tokens_in_their_order(client: openai.OpenAI, *, is_stream: bool) -> None:
    answer = client.chat.completions.create(
        model="tiny-llama",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=3,
        temperature=0,
        logprobs=True,
        stream=is_stream,
        extra_body=GIVEN,
    )
    parts = [answer] if isinstance(answer, openai.types.chat.ChatCompletion) else [*answer]
    tokens = [
        token
        for part in parts
        for choice in part.choices
        if choice.logprobs is not None
        for token in choice.logprobs.content or ()
    ]
    assert len(tokens) == 3
    for token in tokens:
        assert [top.token for top in token.top_logprobs] == NAMES


def test_grpc_reports_the_tokens(server: ServerProcess, truth: list[float]) -> None:
    sampling = pb.SamplingParams(max_tokens=1, logprobs=0, logprob_token_ids=TOKEN_IDS)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        answers = list(stub.Generate(pb.GenerateRequest(text=TEXT, sampling=sampling)))
    (found,) = [one for part in answers for seq in part.sequences for one in seq.logprobs]
    assert [top.token_id for top in found.top_logprobs] == TOKEN_IDS
    assert [top.logprob for top in found.top_logprobs] == pytest.approx(truth, abs=1e-3)


def test_ranks_of_the_tokens_are_not_known(truth: list[float]) -> None:
    params = SamplingParams(max_tokens=1, logprobs=2, logprob_token_ids=TOKEN_IDS)
    options: dict[str, Any] = {  # Any: options of all types
        "executor": "local",
        "device": "cpu",
        "dtype": "float32",
        "show_progress": False,
    }
    with LLM(TINY_LLAMA, **options) as llm:
        (result,) = llm.generate(TEXT, params, use_tqdm=False)
    assert result.outputs[0].logprobs is not None
    (found,) = result.outputs[0].logprobs
    assert [found[token_id].logprob for token_id in TOKEN_IDS] == pytest.approx(truth, abs=1e-3)
    assert {one.rank for one in found.values()} == {None}
