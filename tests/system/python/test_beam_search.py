"""Beams equal those of transformers, token for token and score for score."""

from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest
import torch
import transformers

from pagedray import LLM, BeamSearchParams, SamplingParams
from pagedray.errors import InvalidRequestError
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.system.engines import EngineServer, open_llm
from tests.system.server_process import TINY_LLAMA

PROMPTS = ["class Queue:", "def read_config(path):\n", "The"]
CASES = {
    "plain": BeamSearchParams(beam_width=4, max_tokens=12),
    "one beam": BeamSearchParams(beam_width=1, max_tokens=8),
    "long": BeamSearchParams(beam_width=3, max_tokens=24, length_penalty=2.0),
    "without penalty": BeamSearchParams(beam_width=6, max_tokens=10, length_penalty=0.0),
    "short": BeamSearchParams(beam_width=5, max_tokens=10, length_penalty=-1.5),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(num_blocks=512) as engine:
        yield engine


@pytest.fixture(scope="module")
def model() -> Any:  # Any: transformers' annotations exclude what it returns
    return transformers.AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)


@pytest.mark.parametrize("params", CASES.values(), ids=CASES.keys())
def test_beams_are_those_of_transformers(
    llm: LLM,
    model: Any,
    params: BeamSearchParams,  # Any: as above
) -> None:
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        token_ids = llm.get_tokenizer().encode(prompt)
        expected = model.generate(
            torch.tensor([token_ids]),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        for beam, sequence in zip(output.sequences, expected.sequences.tolist(), strict=True):
            # It pads with 0.
            padding = [0] * (len(sequence) - len(beam.tokens))
            assert [*beam.tokens, *padding] == sequence
        if params.beam_width > 1:
            scores = [beam.score for beam in output.sequences]
            assert scores == pytest.approx(expected.sequences_scores.tolist(), rel=1e-4)


def test_results_have_their_shape(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    (output,) = llm.beam_search({"prompt": PROMPTS[0]}, params)
    best = output.sequences[0]
    prompt_ids = llm.get_tokenizer().encode(PROMPTS[0])
    assert list(best.tokens[: len(prompt_ids)]) == prompt_ids
    assert best.text == llm.get_tokenizer().decode(best.tokens)
    assert best.cum_logprob == pytest.approx(sum(one.chosen for one in best.logprobs))
    assert best.score == pytest.approx(best.cum_logprob / 3)
    assert (best.finish_reason, best.stop_reason) == ("length", None)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"beam_width": 0}, "beam_width must be from 1 to 20, not 0"),
        ({"beam_width": True}, "beam_width must be from 1 to 20, not True"),
        ({"beam_width": 2, "ignore_eos": "no"}, "ignore_eos must be true or false, not 'no'"),
        ({"beam_width": 2, "include_stop_str_in_output": 1}, "include_stop_str_in_output must be"),
        ({"beam_width": 2, "length_penalty": True}, "length_penalty must be from -10 to 10"),
        # It has two end-of-sequence tokens.
        ({"beam_width": 19}, "beam_width must be from 1 to 18 for this model, not 19"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens must be 1 or more, not 0"),
        ({"beam_width": 2, "max_tokens": 5000}, "max_tokens must be from 1 to"),
        ({"beam_width": 2, "early_stopping": "always"}, "early_stopping must be true, false or"),
        (
            {"beam_width": 2, "length_penalty": float("nan")},
            "length_penalty must be from -10 to 10",
        ),
    ],
)
def test_other_parameters_are_rejected(
    llm: LLM,
    options: dict[str, Any],
    text: str,  # Any: what is wrong
) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        llm.beam_search("The", BeamSearchParams(**{"max_tokens": 4, **options}))


def test_sampling_params_are_not_those_of_a_search(llm: LLM) -> None:
    params: Any = SamplingParams(max_tokens=4)  # Any: of another type
    with pytest.raises(InvalidRequestError, match="params must be BeamSearchParams, not Sampling"):
        llm.beam_search("The", params)


@pytest.fixture(scope="module")
def server() -> Iterator[EngineServer]:
    with EngineServer(dtype="float32") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: EngineServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def stub(server: EngineServer) -> Iterator[pagedray_pb2_grpc.GenerationServiceStub]:
    with grpc.insecure_channel(server.grpc_target) as channel:
        yield pagedray_pb2_grpc.GenerationServiceStub(channel)


def test_beams_over_http_are_those_of_python(llm: LLM, client: openai.OpenAI) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=12, length_penalty=0.5)
    answer = client.completions.create(
        model="tiny-llama",
        prompt=PROMPTS,
        n=3,
        max_tokens=12,
        logprobs=1,
        extra_body={"use_beam_search": True, "length_penalty": 0.5, "return_token_ids": True},
    )
    beams = [one for output in llm.beam_search(PROMPTS, params) for one in output.sequences]
    assert len(answer.choices) == len(beams) == 9
    for choice, beam in zip(answer.choices, beams, strict=True):
        token_ids = choice.token_ids  # type: ignore[attr-defined]  # of vLLM
        assert token_ids == list(beam.tokens[-len(token_ids) :])
        assert choice.finish_reason == beam.finish_reason
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert sum(choice.logprobs.token_logprobs) == pytest.approx(beam.cum_logprob, rel=1e-4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(beam.logprobs) for beam in beams)


def test_beams_over_grpc_are_those_of_python(
    llm: LLM, stub: pagedray_pb2_grpc.GenerationServiceStub
) -> None:
    for penalty in (None, 0.5):
        params = BeamSearchParams(beam_width=3, max_tokens=12, length_penalty=penalty or 1.0)
        sampling = pb.SamplingParams(
            n=3, max_tokens=12, logprobs=0, beam_search=pb.BeamSearch(length_penalty=penalty)
        )
        (output,) = llm.beam_search(PROMPTS[0], params)
        answers = stub.Generate(pb.GenerateRequest(text=PROMPTS[0], sampling=sampling))
        found = [sequence for answer in answers for sequence in answer.sequences]
        for sequence, beam in zip(found, output.sequences, strict=True):
            assert tuple(sequence.token_ids) == beam.tokens[-len(sequence.token_ids) :]
            total = sum(one.logprob for one in sequence.logprobs)
            assert total == pytest.approx(beam.cum_logprob, rel=1e-4)


def test_chat_over_grpc_has_the_beams_of_http(
    client: openai.OpenAI, stub: pagedray_pb2_grpc.GenerationServiceStub
) -> None:
    whole = client.chat.completions.create(
        model="tiny-llama",
        messages=[{"role": "user", "content": "What does put do?"}],
        n=2,
        max_tokens=8,
        extra_body={"use_beam_search": True},
    )
    user = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="What does put do?")
    sampling = pb.SamplingParams(n=2, max_tokens=8, beam_search=pb.BeamSearch())
    answers = stub.Chat(pb.ChatRequest(messages=[user], sampling=sampling))
    found = [sequence.content for answer in answers for sequence in answer.sequences]
    assert found == [choice.message.content for choice in whole.choices]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"beam_search": pb.BeamSearch(length_penalty=11)},
            "length_penalty must be from -10 to 10",
        ),
        ({"beam_search": pb.BeamSearch(), "stop": ["a"]}, "stop cannot be combined with beam_se"),
        ({"beam_search": pb.BeamSearch(), "repetition_penalty": 2}, "repetition_penalty cannot"),
        ({"beam_search": pb.BeamSearch(), "n": 19}, "n must be from 1 to 18 in a beam search"),
    ],
)
def test_other_messages_are_rejected(
    stub: pagedray_pb2_grpc.GenerationServiceStub,
    given: dict[str, Any],  # Any: what is wrong
    text: str,
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(pb.GenerateRequest(text="The", sampling=pb.SamplingParams(**given))))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert text in (caught.value.details() or "")


def test_chat_over_grpc_rejects_tools(stub: pagedray_pb2_grpc.GenerationServiceStub) -> None:
    user = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="Hi")
    sampling = pb.SamplingParams(beam_search=pb.BeamSearch())
    choice = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)
    request = pb.ChatRequest(
        messages=[user], sampling=sampling, tools=[pb.Tool(name="a")], tool_choice=choice
    )
    with pytest.raises(grpc.RpcError, match="tools cannot be combined with beam_search"):
        list(stub.Chat(request))


def test_a_stream_has_the_beams_of_a_conversation(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": "What does put do?"}],
        "n": 2,
        "max_tokens": 8,
        "extra_body": {"use_beam_search": True},
    }
    whole = client.chat.completions.create(**asked)
    texts = ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"length_penalty": 2}, "length_penalty requires use_beam_search = true."),
        (
            {"use_beam_search": True, "length_penalty": 11},
            "length_penalty must be from -10 to 10, not",
        ),
        ({"use_beam_search": True, "n": 19}, "n must be from 1 to 18 in a beam search, not 19"),
        ({"use_beam_search": True, "stop": ["a"]}, "stop cannot be combined with use_beam_search"),
        ({"use_beam_search": True, "min_tokens": 1}, "min_tokens cannot be combined with use_be"),
    ],
)
def test_other_bodies_are_rejected(
    client: openai.OpenAI,
    extra: dict[str, Any],  # Any: what is wrong
    text: str,
) -> None:
    with pytest.raises(openai.BadRequestError, match=text):
        client.completions.create(model="tiny-llama", prompt="The", extra_body=extra)
