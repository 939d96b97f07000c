"""The search alone finds transformers' beams, also when many of them end."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.llm.generation import Completion, Generation, Logprob, first_logprobs
from cluster.serving.beam_search import Beam, BeamSearch, EarlyStopping
from pagedray.batch import TokenLogprobs
from pagedray.errors import EngineError
from pagedray.request import FinishReason

PROMPT = [1, 2, 6]
MAX_TOKENS = 9
CASES: list[tuple[int, float, EarlyStopping]] = list(
    itertools.product((2, 5), (-1.0, 0.0, 1.0, 2.0), (False, True, "never"))
)


@pytest.fixture(scope="module")
def model() -> Any:  # Any: transformers' annotations exclude what it returns
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight *= 40.0
    return model


def likeliest(model: Any, beam: Beam, number: int) -> TokenLogprobs:  # Any: as above
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + list(beam.token_ids)])).logits[0, -1]
    values, ids = torch.log_softmax(logits, dim=-1).topk(number)
    return TokenLogprobs(0.0, ids.tolist(), values.tolist())


@pytest.mark.parametrize("eos_token_ids", [(3,), (3, 7, 9)], ids=str)
def test_ended_beams_are_those_of_transformers(
    model: Any,
    eos_token_ids: tuple[int, ...],  # Any: as above
) -> None:
    num_ended = 0
    for width, length_penalty, early_stopping in CASES:
        search = searched(model, eos_token_ids, width, length_penalty, early_stopping)
        expected = model.generate(
            torch.tensor([PROMPT]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=MAX_TOKENS,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=list(eos_token_ids),
            pad_token_id=11,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        case = (width, length_penalty, early_stopping)
        for (_, beam), sequence in zip(search.best, expected.sequences.tolist(), strict=True):
            end = len(PROMPT) + len(beam.token_ids)
            assert sequence[:end] == [*PROMPT, *beam.token_ids], case
            assert set(sequence[end:]) <= {11}, case
            num_ended += beam.is_ended
        scores = [score for score, _ in search.best]
        assert scores == pytest.approx(expected.sequences_scores.tolist(), rel=1e-5), case
    assert num_ended > len(CASES)


def searched(
    model: Any,  # Any: as above
    eos_token_ids: tuple[int, ...],
    width: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
) -> BeamSearch:
    search = BeamSearch(
        width=width,
        max_tokens=MAX_TOKENS,
        eos_token_ids=eos_token_ids,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    while search.running:
        search.advance([likeliest(model, beam, search.num_logprobs) for beam in search.running])
    return search


@pytest.mark.parametrize(
    ("reason", "has_token"),
    [
        (None, False),
        (FinishReason.ABORT, False),
        (FinishReason.ERROR, False),
        (FinishReason.ERROR, True),
        (FinishReason.LENGTH, True),
    ],
)
def test_a_step_that_the_engine_ended_is_an_engine_error(
    reason: FinishReason | None, has_token: bool
) -> None:
    found = {5: Logprob(-0.1, 1, "a"), 6: Logprob(-2.0, 2, "b")}
    output = Completion(
        index=0,
        text="",
        token_ids=(5,) if has_token else (),
        finish_reason=reason,
        logprobs=(found,) if has_token else (),
    )
    step = Generation(request_id="a", prompt=None, prompt_token_ids=(1,), outputs=(output,))
    if reason is FinishReason.LENGTH:
        assert first_logprobs(step) == TokenLogprobs(-0.1, [5, 6], [-0.1, -2.0])
    else:
        with pytest.raises(EngineError, match=reason.value if reason else "no event"):
            first_logprobs(step)
