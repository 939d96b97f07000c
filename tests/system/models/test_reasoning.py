"""A model that reasons before its structure, with real masks and a real engine."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedray import LLM, SamplingParams
from pagedray.errors import InvalidRequestError
from pagedray.request import FinishReason
from pagedray.sampling_params import Structure
from tests.system.engines import open_llm
from tests.system.server_process import TINY_LLAMA

REGEX = "[a-f]{2,6}-[0-9]{3}"
ASK = [{"role": "user", "content": "Some things are"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("reasoning")
    write_reasoning_model(folder)
    with open_llm(folder, max_model_len=512, structure_compile_s=20.0) as llm:
        yield llm


def params(**changes: Any) -> SamplingParams:  # Any: fields of all types
    fields: dict[str, Any] = {
        "max_tokens": 300,
        "temperature": 1.5,
        "structure": Structure(kind="regex", text=REGEX),
        "logit_bias": {END_TOKEN_ID: 6.0},
        "n": 8,
        "seed": 5,
    }
    return SamplingParams(**(fields | changes))


def test_structure_applies_behind_the_reasoning(llm: LLM) -> None:
    (result,) = llm.chat(ASK, params(), use_tqdm=False)
    # How long one reasons depends on the CPU's rounding, so that one may not come to its end.
    ended = [output for output in result.outputs if len(output.token_ids) < 300]
    assert len(ended) >= 4
    for output in ended:
        assert output.finish_reason is FinishReason.STOP
        assert re.fullmatch(REGEX, output.content), output.text
        assert output.text.count("</think>") == 1
    assert sum(len(output.reasoning or "") > 10 for output in ended) >= 2


def test_reasoning_without_an_end_has_no_answer(llm: LLM) -> None:
    given = params(logit_bias={END_TOKEN_ID: -100.0, 0: 5.0, 1: 5.0}, max_tokens=30)
    (result,) = llm.chat(ASK, given, use_tqdm=False)
    for output in result.outputs:
        assert output.finish_reason is FinishReason.LENGTH
        assert (output.content, len(output.token_ids)) == ("", 30)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_reasoning_ends_at_its_budget(llm: LLM, temperature: float) -> None:
    given = params(
        structure=None,
        temperature=temperature,
        logit_bias={END_TOKEN_ID: -100.0, 0: -100.0, 1: -100.0},
        max_tokens=24,
        n=3,
    )
    limited = params(
        structure=None,
        temperature=temperature,
        logit_bias=given.logit_bias,
        max_tokens=24,
        n=3,
        thinking_token_budget=10,
    )
    (free,) = llm.chat(ASK, given, use_tqdm=False)
    (result,) = llm.chat(ASK, limited, use_tqdm=False)
    for output, other in zip(result.outputs, free.outputs, strict=True):
        assert output.token_ids[:10] == other.token_ids[:10]
        assert output.token_ids.index(END_TOKEN_ID) == 10
        assert len(output.token_ids) == 24
        assert (other.content, bool(output.content)) == ("", True)


def test_budget_that_is_not_reached_changes_no_token(llm: LLM) -> None:
    def token_ids(budget: int | None, **changes: Any) -> list[list[int]]:  # Any: fields
        given = params(structure=None, thinking_token_budget=budget, max_tokens=40, n=4, **changes)
        (result,) = llm.chat(ASK, given, use_tqdm=False)
        return [list(output.token_ids) for output in result.outputs]

    # The reasoning ends before the budget, the turn after it, however the CPU rounds.
    for changes in (
        {"logit_bias": {END_TOKEN_ID: 14.0}, "ignore_eos": True},
        {"logit_bias": {END_TOKEN_ID: 14.0, 1: 15.0}, "min_tokens": 25},
    ):
        expected = token_ids(None, **changes)
        ends = [ids.index(END_TOKEN_ID) for ids in expected]
        assert max(ends) < 20
        assert min(map(len, expected)) > 20
        for budget in (max(ends), 20, 10_000):
            assert token_ids(budget, **changes) == expected


def test_structure_follows_reasoning_that_was_ended(llm: LLM) -> None:
    given = params(logit_bias={END_TOKEN_ID: -100.0}, thinking_token_budget=5, max_tokens=100, n=4)
    (result,) = llm.chat(ASK, given, use_tqdm=False)
    for output in result.outputs:
        assert output.finish_reason is FinishReason.STOP
        assert re.fullmatch(REGEX, output.content), output.text
        assert output.token_ids.index(END_TOKEN_ID) == 5


def test_budget_has_no_effect_without_reasoning(llm: LLM) -> None:
    found = [
        llm.chat(
            ASK,
            params(structure=None, max_tokens=20, thinking_token_budget=budget),
            use_tqdm=False,
            chat_template_kwargs={"enable_thinking": False},
        )
        for budget in (None, 0)
    ]
    (free,), (limited,) = found
    texts = [[output.token_ids for output in one.outputs] for one in (free, limited)]
    assert texts[0] == texts[1]


def test_budget_of_a_text_is_rejected(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="requires a conversation"):
        llm.generate("Some things are", params(thinking_token_budget=3), use_tqdm=False)


def test_prompt_may_end_the_reasoning(llm: LLM) -> None:
    (result,) = llm.chat(
        ASK, params(), use_tqdm=False, chat_template_kwargs={"enable_thinking": False}
    )
    for output in result.outputs:
        assert output.reasoning is None
        assert re.fullmatch(REGEX, output.content.lstrip()), output.text
    (plain,) = llm.generate("Some things are", params(), use_tqdm=False)
    assert all(re.fullmatch(REGEX, output.text) for output in plain.outputs)


_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "<|assistant|>{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}"
)
END_TOKEN_ID = 3071
"""The token of `</think>`, the last one of the vocabulary."""


def write_reasoning_model(folder: Path) -> None:
    """Write the model to an empty folder."""
    for path in TINY_LLAMA.iterdir():
        if path.name != "tokenizer.json":
            shutil.copy(path, folder)
    tokenizer = json.loads((TINY_LLAMA / "tokenizer.json").read_text())
    model = tokenizer["model"]
    (last,) = (token for token, token_id in model["vocab"].items() if token_id == END_TOKEN_ID)
    del model["vocab"][last]
    model["merges"] = [merge for merge in model["merges"] if "".join(merge) != last]
    added = {**tokenizer["added_tokens"][0], "id": END_TOKEN_ID, "content": "</think>"}
    tokenizer["added_tokens"].append({**added, "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
