"""Requests that HTTP and gRPC can express, and their rejections."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pagedray.v1 import pagedray_pb2 as pb

__all__ = ["CASES", "Case"]

_TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True)
class Case:
    """A request that both frontends can write, and the rejection."""

    text: str
    param: str
    prompt: str | list[int] = "hello"
    client_id: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)  # Any: fields of all types
    code: str | None = None

    def grpc_message(self) -> pb.GenerateRequest:
        """Return the request for gRPC."""
        message = pb.GenerateRequest(
            request_id=self.client_id, sampling=pb.SamplingParams(**self.sampling)
        )
        if isinstance(self.prompt, str):
            message.text = self.prompt
        else:
            message.token_ids.ids.extend(self.prompt)
            message.token_ids.SetInParent()
        return message


CASES = {
    "empty prompt": Case("prompt must not be empty.", "prompt", prompt=""),
    "no token ids": Case("prompt must not be empty.", "prompt", prompt=[]),
    "long prompt": Case(
        "prompt has 256 tokens, but the context length of 256 allows at most 255 and one generated "
        "token.",
        "prompt",
        prompt=[5] * 256,
        code=_TOO_LONG,
    ),
    "long text": Case(
        "prompt has 301 tokens, but the context length of 256 allows at most 255 and one generated "
        "token.",
        "prompt",
        prompt="~" * 300,
        code=_TOO_LONG,
    ),
    "huge text": Case(
        "prompt has 1000000 characters, but the context of 256 tokens holds at most 3328.",
        "prompt",
        prompt="x" * 1_000_000,
        code=_TOO_LONG,
    ),
    "huge token list": Case(
        "prompt has 8000 tokens, but the context length of 256 allows at most 255 and one "
        "generated token.",
        "prompt",
        prompt=[5] * 8000,
        code=_TOO_LONG,
    ),
    "unknown token": Case(
        "prompt contains token id 320, but ids are 0 to 319.", "prompt", prompt=[5, 320]
    ),
    "max_tokens too large": Case(
        "max_tokens must be from 1 to 253, not 254: the prompt has 3 tokens and the "
        "context length is 256.",
        "max_tokens",
        prompt=[5, 6, 7],
        sampling={"max_tokens": 254},
        code=_TOO_LONG,
    ),
    "temperature": Case(
        "temperature must be from 0 to 100, not -0.1.",
        "temperature",
        sampling={"temperature": -0.1},
    ),
    "top_p": Case("top_p must be from 0 to 1, not 1.01.", "top_p", sampling={"top_p": 1.01}),
    "min_p": Case("min_p must be from 0 to 1, not 2.", "min_p", sampling={"min_p": 2.0}),
    "repetition_penalty": Case(
        "repetition_penalty must be from 0.01 to 100, not 0.",
        "repetition_penalty",
        sampling={"repetition_penalty": 0.0},
    ),
    "presence_penalty": Case(
        "presence_penalty must be from -2 to 2, not 2.5.",
        "presence_penalty",
        sampling={"presence_penalty": 2.5},
    ),
    "frequency_penalty": Case(
        "frequency_penalty must be from -2 to 2, not -3.",
        "frequency_penalty",
        sampling={"frequency_penalty": -3.0},
    ),
    "n 0": Case("n must be from 1 to 128, not 0.", "n", sampling={"n": 0}),
    "n 1000": Case("n must be from 1 to 128, not 1000.", "n", sampling={"n": 1000}),
    "n of 10^9": Case(
        "n must be from 1 to 128, not 1000000000.", "n", sampling={"n": 1_000_000_000}
    ),
    "logprobs": Case(
        "logprobs must be from 0 to 20, not 21.", "logprobs", sampling={"logprobs": 21}
    ),
    "empty stop": Case(
        "stop must contain strings of 1 to 512 characters.", "stop", sampling={"stop": [""]}
    ),
    "long stop": Case(
        "stop must contain strings of 1 to 512 characters.", "stop", sampling={"stop": ["x" * 513]}
    ),
    "many stops": Case(
        "stop may have at most 16 entries, not 17.", "stop", sampling={"stop": ["x"] * 17}
    ),
    "unknown stop token": Case(
        "stop_token_ids contains token id 999, but ids are 0 to 319.",
        "stop_token_ids",
        sampling={"stop_token_ids": [999]},
    ),
    "many stop tokens": Case(
        "stop_token_ids may have at most 1024 entries, not 8000.",
        "stop_token_ids",
        sampling={"stop_token_ids": [5] * 8000},
    ),
    "unknown biased token": Case(
        "logit_bias contains token id 320, but ids are 0 to 319.",
        "logit_bias",
        sampling={"logit_bias": {320: 1.0}},
    ),
    "large bias": Case(
        "logit_bias must be from -100 to 100, not 101.",
        "logit_bias",
        sampling={"logit_bias": {5: 101.0}},
    ),
    "many biases": Case(
        "logit_bias may have at most 1024 entries, not 1025.",
        "logit_bias",
        sampling={"logit_bias": dict.fromkeys(range(1025), 1.0)},
    ),
    "allowed token beyond the vocabulary": Case(
        "allowed_token_ids contains token id 320, but ids are 0 to 319.",
        "allowed_token_ids",
        sampling={"allowed_token_ids": [5, 320]},
    ),
    "too many allowed tokens": Case(
        "allowed_token_ids may have at most 4096 entries, not 4097.",
        "allowed_token_ids",
        sampling={"allowed_token_ids": [5] * 4097},
    ),
    "no token is allowed": Case(
        "allowed_token_ids must contain a token that does not end the output if min_tokens is set.",
        "allowed_token_ids",
        sampling={"allowed_token_ids": [1, 7], "stop_token_ids": [7], "min_tokens": 2},
    ),
    "bad word of spaces": Case(
        "bad_words must contain strings of 1 to 128 characters that are not blank.",
        "bad_words",
        sampling={"bad_words": ["a", " "]},
    ),
    "long bad word": Case(
        "bad_words must contain strings of 1 to 128 characters that are not blank.",
        "bad_words",
        sampling={"bad_words": ["a" * 129]},
    ),
    "bad word of many tokens": Case(
        "bad_words must contain strings of 1 to 32 tokens, but '~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~' "
        "has 33.",
        "bad_words",
        sampling={"bad_words": ["~" * 33]},
    ),
    "too many bad words": Case(
        "bad_words may have at most 256 entries, not 257.",
        "bad_words",
        sampling={"bad_words": ["a"] * 257},
    ),
    "all allowed tokens end bad words": Case(
        "allowed_token_ids must contain a token that does not end one of bad_words.",
        "allowed_token_ids",
        # Of the test's tokenizer: "!" and "#".
        sampling={"allowed_token_ids": [5, 7], "bad_words": ["!", "~#"]},
    ),
    "long id": Case(
        "request_id must have 1 to 128 printable characters.", "request_id", client_id="x" * 129
    ),
}
