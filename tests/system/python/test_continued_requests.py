"""With a real model, requests continue from generated tokens as if they had not been cut off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from cluster.llm.llm import LLM
from cluster.llm.prompts import SaltedPrompt
from pagedray.request import Request
from pagedray.sampling_params import SamplingParams
from pagedray.structure import Structure
from tests.system.server_process import TINY_LLAMA

SCHEMA = '{"type": "array", "items": {"type": "integer"}, "minItems": 9}'
CASES: dict[str, dict[str, Any]] = {  # Any: fields of several types
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 5, "top_p": 0.9, "n": 2},
    "penalties": {"seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.7},
    # Of the two tokens of a word nearly alone.
    "bad words": {"seed": 5, "bad_words": ["self._"], "logit_bias": {291: 30.0, 349: 30.0}, "n": 4},
    "end of text": {"seed": 5, "ignore_eos": False, "min_tokens": 20},
    "structure": {"seed": 5, "structure": Structure(kind="json_schema", text=SCHEMA), "n": 2},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        TINY_LLAMA,
        show_progress=False,
        executor="local",
        device="cpu",
        dtype="float32",
        num_threads=1,
        num_blocks=256,
    ) as llm:
        yield llm


def tokens_of(llm: LLM, requests: Sequence[Request]) -> list[list[tuple[int, ...]]]:
    """Run requests; return the tokens that each sequence gained."""
    buffer = llm._sink.open_buffer(requests, is_watched=False)
    gained: dict[str, list[list[int]]] = {
        one.id: [[] for _ in range(one.sampling.n)] for one in requests
    }
    num_open = sum(len(one.open_indices) for one in requests)
    for one in requests:
        llm._controller.submit_request(one)
    while num_open:
        for event in buffer.take_events():
            gained[event.request_id][event.index] += event.token_ids
            num_open -= event.finish_reason is not None
    llm._sink.close_buffer(requests)
    return [[tuple(tokens) for tokens in gained[one.id]] for one in requests]


@pytest.mark.parametrize("sampling", CASES.values(), ids=CASES.keys())
def test_a_continued_request_has_the_same_tokens(llm: LLM, sampling: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **sampling})
    (request,) = llm._validated(
        llm._requests.sample([SaltedPrompt("def read_config(path):\n")], params)
    )
    (whole,) = tokens_of(llm, [request])
    cuts = range(0, max(map(len, whole)), 9)
    continued = [
        msgspec.structs.replace(
            request,
            id=f"{request.id}-{cut}",
            # A sequence that was finished by then does not run.
            generated_token_ids=tuple(
                tokens[: cut + index] if cut + index < len(tokens) else None
                for index, tokens in enumerate(whole)
            ),
        )
        for cut in cuts
    ]
    for one, gained in zip(continued, tokens_of(llm, continued), strict=True):
        for begun, added, tokens in zip(one.generated_token_ids, gained, whole, strict=True):
            assert added == () if begun is None else (*begun, *added) == tokens
