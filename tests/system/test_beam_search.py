"""Beams equal those of transformers, token for token and score for score."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from pagedray import LLM, BeamSearchParams
from pagedray.errors import InvalidRequestError
from tests.system.server_process import TINY_LLAMA

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    with LLM(
        str(TINY_LLAMA),
        executor="local",
        device="cpu",
        dtype="float32",
        num_threads=1,
        num_blocks=512,
        show_progress=False,
    ) as engine:
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
def test_other_parameters_are_refused(
    llm: LLM,
    options: dict[str, Any],
    text: str,  # Any: what is wrong
) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        llm.beam_search("The", BeamSearchParams(**{"max_tokens": 4, **options}))
