"""The scheduler's output: tokens and ends of sequences."""

import msgspec

from pagedray.batch import PromptLogprobs, TokenLogprobs
from pagedray.request import FinishReason

__all__ = ["ChainEvent", "TokenEvent"]


# Events are never part of a reference cycle, so the garbage collector need not track them.
class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """Tokens of a sequence, its end, or both."""

    request_id: str
    index: int
    """Index of the sequence in its request."""
    token_ids: tuple[int, ...] = ()
    """Includes the token that ended the sequence."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Empty, or an entry for each token."""
    finish_reason: FinishReason | None = None
    """Set only in the last event of a sequence."""
    stop_token_id: int | None = None
    """The end-of-sequence or stop token that ended the sequence."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    num_prompt_tokens: int = 0
    started_s: float = 0.0
    """When the request was first planned, on the scheduler's clock; 0 if it was not."""
    error: str = ""
    """The reason if the client's structure ended the sequence with an error; otherwise empty."""
    is_lethal: bool = False
    """Whether the sequence ended with an error because the ranks die whenever its request runs."""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """Log-probabilities of the whole prompt, if requested, in the first event of its first
    sequence."""


class ChainEvent(TokenEvent, frozen=True, gc=False):
    """Tokens of a sequence with drafts. A class of its own, so that other events stay small."""

    num_accepted: int = 0
    """Drafts that were right; the next field counts drafts that were not."""
    num_refused: int = 0
