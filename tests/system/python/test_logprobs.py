"""Log-probabilities over each API equal those of transformers."""

from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import msgspec
import openai
import pytest
import torch
import transformers

from pagedray import LLM, Generation, SamplingParams
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.system.engines import EngineServer
from tests.system.server_process import TINY_LLAMA

PROMPTS = [[(7 * place + seed) % 500 for place in range(size)] for seed, size in
           enumerate((2, 5, 40, 97, 61))]  # fmt: skip
NUM_LIKELIEST = 3


@pytest.fixture(scope="module")
def truth() -> list[torch.Tensor]:
    """The log-probabilities of all tokens after each position of each prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
    with torch.no_grad():
        return [
            model(torch.tensor([prompt])).logits[0].double().log_softmax(-1) for prompt in PROMPTS
        ]


def check(found: list[Generation], truth: list[torch.Tensor]) -> None:
    for generation, prompt, expected in zip(found, PROMPTS, truth, strict=True):
        assert generation.prompt_logprobs is not None
        first, *others = generation.prompt_logprobs
        assert first is None
        assert len(others) == len(prompt) - 1
        for token, entry, row in zip(prompt[1:], others, expected, strict=False):
            assert entry is not None
            own = entry[token]
            assert own.logprob == pytest.approx(row[token].item(), abs=2e-4)
            assert own.rank == 1 + int((row > row[token]).sum())
            likeliest = row.topk(NUM_LIKELIEST)
            listed = list(entry.items())[:NUM_LIKELIEST]
            assert [other for other, _ in listed] == likeliest.indices.tolist()
            logprobs = [one.logprob for _, one in listed]
            assert logprobs == pytest.approx(likeliest.values.tolist(), abs=2e-4)


def llm(**options: Any) -> LLM:  # Any: engine options
    given: dict[str, Any] = {
        "executor": "local",
        "device": "cpu",
        "dtype": "float32",
        "num_threads": 1,
    }
    return LLM(TINY_LLAMA, show_progress=False, **(given | options))


PARAMS = SamplingParams(temperature=0.0, prompt_logprobs=NUM_LIKELIEST)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        # So few blocks that sequences are preempted and computed again.
        {"num_blocks": 9, "block_size": 16, "max_model_len": 128, "preemption": "recompute"},
    ],
    ids=["whole", "chunks", "preempted"],
)
def test_they_equal_those_of_transformers(
    options: dict[str, Any], truth: list[torch.Tensor]
) -> None:
    params = msgspec.structs.replace(PARAMS, max_tokens=30)
    with llm(**options) as model:
        # A cached prefix must not leave out what was requested.
        model.generate(PROMPTS, SamplingParams(max_tokens=1), use_tqdm=False)
        for _ in range(2):
            check(model.generate(PROMPTS, params, use_tqdm=False), truth)
        plain = model.generate(PROMPTS, SamplingParams(max_tokens=1), use_tqdm=False)
        assert all(one.prompt_logprobs is None for one in plain)
        if "preemption" in options:
            assert model.stats().scheduler.num_recompute_preemptions > 0
        else:
            assert sum(one.num_cached_tokens for one in plain) > 0


def test_sequences_of_a_prompt_share_them(truth: list[torch.Tensor]) -> None:
    params = SamplingParams(n=3, max_tokens=2, seed=1, prompt_logprobs=NUM_LIKELIEST)
    with llm() as model:
        check(model.generate(PROMPTS, params, use_tqdm=False), truth)


def test_reported_tokens_do_not_change_them(truth: list[torch.Tensor]) -> None:
    params = msgspec.structs.replace(PARAMS, max_tokens=2, logprobs=1, logprob_token_ids=[3])
    with llm() as model:
        check(model.generate(PROMPTS, params, use_tqdm=False), truth)


@pytest.mark.slow
def test_ranks_that_share_the_vocabulary_agree(truth: list[torch.Tensor]) -> None:
    options = {"executor": "ray", "tensor_parallel_size": 2, "max_num_batched_tokens": 16}
    params = msgspec.structs.replace(PARAMS, max_tokens=3)
    with llm(**options, max_num_seqs=4) as model:
        check(model.generate(PROMPTS, params, use_tqdm=False), truth)


TEXTS = ["def first(items): return items[0]", "class Empty: pass"]


@pytest.fixture(scope="module")
def server() -> Iterator[EngineServer]:
    # Prompts are computed in several chunks.
    with EngineServer(dtype="float32", max_num_batched_tokens=8, max_num_seqs=4) as server:
        yield server


@pytest.fixture(scope="module")
def text_logprobs() -> list[tuple[list[int], torch.Tensor]]:
    """The token ids of each text, and the log-probabilities after each of them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_LLAMA)
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
    found = []
    for text in TEXTS:
        token_ids = tokenizer(text).input_ids
        with torch.no_grad():
            logits = model(torch.tensor([token_ids])).logits[0]
        found.append((token_ids, logits.double().log_softmax(-1)))
    return found


def own(text_logprobs: tuple[list[int], torch.Tensor]) -> list[float]:
    token_ids, logprobs = text_logprobs
    pairs = zip(logprobs, token_ids[1:], strict=False)
    return [row[token_id].item() for row, token_id in pairs]


def test_echo_scores_the_prompt(
    server: EngineServer, text_logprobs: list[tuple[list[int], torch.Tensor]]
) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model="tiny-llama", prompt=TEXTS, max_tokens=0, echo=True, logprobs=2
        )
    assert [choice.text for choice in answer.choices] == TEXTS
    for choice, expected, text in zip(answer.choices, text_logprobs, TEXTS, strict=True):
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.top_logprobs is not None
        assert logprobs.tokens is not None
        assert logprobs.text_offset is not None
        first, *others = logprobs.token_logprobs
        assert first is None
        assert others == pytest.approx(own(expected), abs=1e-3)
        assert logprobs.top_logprobs[0] is None
        for value, top in zip(others, logprobs.top_logprobs[1:], strict=True):
            assert top is not None
            assert len(top) in (2, 3)
            assert value in top.values()
        for token, offset in zip(logprobs.tokens[1:], logprobs.text_offset[1:], strict=True):
            assert text.startswith(token, offset)


def test_generated_tokens_follow_those_of_the_prompt(server: EngineServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        both = client.completions.create(
            model="tiny-llama", prompt=TEXTS[0], max_tokens=4, echo=True, logprobs=1, temperature=0
        )
        alone = client.completions.create(
            model="tiny-llama", prompt=TEXTS[0], max_tokens=4, logprobs=1, temperature=0
        )
    (choice,), (plain,) = both.choices, alone.choices
    assert choice.text == TEXTS[0] + plain.text
    assert choice.logprobs is not None
    assert plain.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.tokens[-4:] == plain.logprobs.tokens
    assert choice.logprobs.text_offset[-4] == len(TEXTS[0])


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_prompt_logprobs_are_listed(server: EngineServer, path: str) -> None:
    given = (
        {"prompt": TEXTS[0]}
        if path == "completions"
        else {"messages": [{"role": "user", "content": TEXTS[0]}]}
    )
    answer = httpx.post(
        f"{server.url}/v1/{path}",
        json={
            "model": "tiny-llama",
            "max_tokens": 1,
            "prompt_logprobs": 1,
            "return_token_ids": True,
        }
        | given,
        timeout=60,
    ).json()
    holder = answer["choices"][0] if path == "completions" else answer
    first, *others = holder["prompt_logprobs"]
    assert first is None
    for token_id, entries in zip(holder["prompt_token_ids"][1:], others, strict=True):
        entry = entries[str(token_id)]
        assert set(entry) == {"logprob", "rank", "decoded_token"}
        assert len(entries) == (1 if entry["rank"] == 1 else 2)


TEXT = "def read_config(path):\n"
TOKEN_IDS = [3000, 17, 5, 1024]
NAMES = [f"token_id:{token_id}" for token_id in TOKEN_IDS]
GIVEN = {"logprob_token_ids": TOKEN_IDS, "return_tokens_as_token_ids": True}


@pytest.fixture(scope="module")
def client(server: EngineServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def next_logprobs() -> list[float]:
    """The log-probabilities of the tokens behind the text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_LLAMA)
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer(TEXT).input_ids])).logits[0, -1]
    found: list[float] = logits.double().log_softmax(-1)[TOKEN_IDS].tolist()
    return found


def test_completions_report_the_tokens(client: openai.OpenAI, next_logprobs: list[float]) -> None:
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
    assert [first[name] for name in NAMES] == pytest.approx(next_logprobs, abs=1e-3)


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


def test_grpc_reports_the_tokens(server: EngineServer, next_logprobs: list[float]) -> None:
    sampling = pb.SamplingParams(max_tokens=1, logprobs=0, logprob_token_ids=TOKEN_IDS)
    with grpc.insecure_channel(server.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        answers = list(stub.Generate(pb.GenerateRequest(text=TEXT, sampling=sampling)))
    (found,) = [one for part in answers for seq in part.sequences for one in seq.logprobs]
    assert [top.token_id for top in found.top_logprobs] == TOKEN_IDS
    assert [top.logprob for top in found.top_logprobs] == pytest.approx(next_logprobs, abs=1e-3)


def test_ranks_of_the_tokens_are_not_known(next_logprobs: list[float]) -> None:
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
    assert [found[token_id].logprob for token_id in TOKEN_IDS] == pytest.approx(
        next_logprobs, abs=1e-3
    )
    assert {one.rank for one in found.values()} == {None}
