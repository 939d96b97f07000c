"""The request that computes the next tokens of a beam."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pagedray.request import SamplingParams

if TYPE_CHECKING:
    from cluster.serving.beam_search import Beam
    from pagedray.request import Request

__all__ = ["beam_step"]


def beam_step(request: Request, beam: Beam, num_logprobs: int) -> Request:
    """Return a request for one token behind a beam of `request`, with the likeliest tokens there.

    The blocks of what precedes it are found in the prefix cache.
    """
    return replace(
        request,
        id=secrets.token_hex(16),
        prompt_token_ids=request.prompt_token_ids + beam.token_ids,
        # An end-of-sequence token is a token like others here.
        sampling=SamplingParams(
            max_tokens=1, temperature=0.0, logprobs=num_logprobs, ignore_eos=True
        ),
        generated_token_ids=(),
    )
