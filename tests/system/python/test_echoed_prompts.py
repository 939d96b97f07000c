"""`echo` and `prompt_logprobs` over HTTP equal what transformers computes."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
import torch
import transformers

from tests.system.server_process import TINY_LLAMA, ServerProcess

TEXTS = ["def first(items): return items[0]", "class Empty: pass"]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    arguments = ("--executor=local", "--device=cpu", "--dtype=float32")
    # Prompts are computed in several chunks.
    with ServerProcess((*arguments, "--max-num-batched-tokens=8", "--max-num-seqs=4")) as process:
        yield process


@pytest.fixture(scope="module")
def truth() -> list[tuple[list[int], torch.Tensor]]:
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


def own(truth: tuple[list[int], torch.Tensor]) -> list[float]:
    token_ids, logprobs = truth
    pairs = zip(logprobs, token_ids[1:], strict=False)
    return [row[token_id].item() for row, token_id in pairs]


def test_echo_scores_the_prompt(
    server: ServerProcess, truth: list[tuple[list[int], torch.Tensor]]
) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model="tiny-llama", prompt=TEXTS, max_tokens=0, echo=True, logprobs=2
        )
    assert [choice.text for choice in answer.choices] == TEXTS
    for choice, expected, text in zip(answer.choices, truth, TEXTS, strict=True):
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


def test_generated_tokens_follow_those_of_the_prompt(server: ServerProcess) -> None:
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
def test_prompt_logprobs_are_listed(server: ServerProcess, path: str) -> None:
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
