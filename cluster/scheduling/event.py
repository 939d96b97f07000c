"""What the scheduler reports of a sequence."""

import msgspec

from pagedray.batch import TokenLogprobs
from pagedray.request import FinishReason

__all__ = ["TokenEvent"]


# Events hold no reference that could lead back to them, so the collector need not follow them.
class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """Tokens that a sequence gained, its end, or both."""

    request_id: str
    index: int
    """Which of the request's sequences."""
    token_ids: tuple[int, ...] = ()
    """The token that ended the sequence included."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Empty, or one for each token."""
    finish_reason: FinishReason | None = None
    """Set in the last event of a sequence and in no other."""
    stop_token_id: int | None = None
    """The end-of-sequence or stop token that ended the sequence."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache spared."""
    num_prompt_tokens: int = 0
    started_s: float = 0.0
    """When the request was first planned, on the clock that the scheduler is told; 0 if never."""
