"""The requests that compute the next tokens of beams."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import SamplingParams
from pagedray.text import pluralize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.serving.beams.search import Beam
    from pagedray.config import SchedulerConfig
    from pagedray.request import Request

__all__ = ["beam_step", "check_beams_fit"]


def beam_step(request: Request, beam: Beam, num_logprobs: int) -> Request:
    """Return a request for a token after a beam of `request`, with the most likely tokens there.

    The prefix cache has the blocks before it.
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


def check_beams_fit(
    requests: Sequence[Request], width: int, limits: SchedulerConfig, *, param: str
) -> None:
    """Raise InvalidRequestError if the longest step of searches exceeds an empty queue.

    The requests of a step are submitted together; otherwise they would wait without end. `param` is
    the name of the width.
    """
    num_beams = width * len(requests)
    if num_beams == 1:
        # A single request always has room.
        return
    if num_beams > limits.max_queued_requests:
        raise InvalidRequestError(
            f"A beam search with {param} {width} for {pluralize(len(requests), 'prompt')} has "
            f"{num_beams} beams, which exceeds max_queued_requests, {limits.max_queued_requests}.",
            param=param,
        )
    num_tokens = width * sum(
        len(request.prompt_token_ids) + request.sampling.max_tokens for request in requests
    )
    if num_tokens > limits.max_queued_tokens:
        raise InvalidRequestError(
            f"A beam search with {param} {width} has up to {num_tokens} tokens, max_tokens "
            f"included, which exceeds max_queued_tokens, {limits.max_queued_tokens}.",
            param=param,
        )
