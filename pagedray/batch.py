"""All that crosses between controller and worker.

A plan carries what changed, not what stayed. A sequence has a row from its start
to its end; the worker keeps the row's tokens, block table and sampling state, and
appends the tokens it samples, so that the controller can send plan k + 1 before it
has seen the tokens of step k. The end of a sequence is not told: its row is named no
more, until a start fills it anew.

A rank carries a plan out in this order: starts, block copies (swap-outs, swap-ins,
then copies on the device), forward pass, sampling. Plans are carried out in the order
they were sent. A block may therefore be given to another sequence by the plan after
the one that last writes it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pagedray.request import SamplingParams

__all__ = [
    "BlockCopy",
    "ControllerMessage",
    "EmbedOutput",
    "EmbedPlan",
    "Pooling",
    "SequencePlan",
    "SequenceStart",
    "Shutdown",
    "StepAck",
    "StepMasks",
    "StepOutput",
    "StepPlan",
    "TokenLogprobs",
    "WorkerFailure",
    "WorkerMessage",
]


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """One block's content goes from `source` to `target`; which pools is the field's matter."""

    source: int
    target: int


class SequenceStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence enters the batch, for the first time or again after preemption."""

    row: int
    """In `[0, max_num_seqs)`; whatever it held has ended."""
    token_ids: list[int]
    """All tokens known so far: the prompt, then what was already sampled."""
    num_prompt_tokens: int
    block_ids: list[int]
    """Its block table so far, cached and swapped-in blocks included."""
    sampling: SamplingParams
    seed: int
    index: int
    """Its index among the sequences of its request."""
    eos_token_ids: tuple[int, ...] = ()
    """Forbidden while fewer than `min_tokens` were sampled."""
    is_masked: bool = False
    """Whether a mask says at each step which tokens it may sample; `min_tokens` is in the mask."""


class SequencePlan(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one sequence that a step computes."""

    row: int
    first_position: int
    num_tokens: int
    is_sampled: bool
    """Whether the step samples the token that follows."""
    new_block_ids: list[int] = []
    """Appended to the row's block table before the forward pass."""


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """What one step runs."""

    step: int
    """Counts up by one within an epoch."""
    sequences: list[SequencePlan]
    """Sequences of several tokens come first, then those of one token."""
    starts: list[SequenceStart] = []
    swap_outs: list[BlockCopy] = []
    """Device block to CPU block."""
    swap_ins: list[BlockCopy] = []
    """CPU block to device block."""
    copies: list[BlockCopy] = []
    """Device block to device block: copy-on-write."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(sequence.num_tokens for sequence in self.sequences)


class StepMasks(msgspec.Struct, frozen=True, array_like=True, tag="masks"):
    """Which tokens the masked sequences of a step may sample.

    They follow the plan of a step that samples for such a sequence, before any other plan, and
    as soon as the tokens of all earlier steps are known; the forward pass does not wait for them.
    """

    step: int
    words: bytes
    """int32 of this machine's order, `[num_masked, ceil(vocab_size / 32)]`, in the plan's order:
    bit `i % 32` of word `i // 32` is set where token `i` may be sampled."""


Pooling = Literal["mean", "cls", "last"]
"""Which tokens make a sequence's vector: the mean of all, the first, the last."""


class EmbedPlan(msgspec.Struct, frozen=True, array_like=True, tag="embed"):
    """Texts that an encoder turns into vectors in one step; it has no rows and no cache."""

    step: int
    """Counts up by one within an epoch."""
    token_ids: list[list[int]]
    """Those of each text, at least one."""
    pooling: Pooling
    is_normalized: bool
    """Whether vectors are scaled to length 1."""


class EmbedOutput(msgspec.Struct, frozen=True, array_like=True, tag="embedded"):
    """What rank 0 returns of such a step."""

    step: int
    vectors: bytes
    """float32 of this machine's order, `[num_texts, hidden_size]`."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, before temperature and penalties."""

    chosen: float
    token_ids: list[int]
    """The likeliest tokens, likeliest first."""
    logprobs: list[float]


class StepOutput(msgspec.Struct, frozen=True, array_like=True, tag="output"):
    """What rank 0 returns of a step."""

    step: int
    token_ids: list[int]
    """One for each sampled sequence, in the plan's order; -1 where logits were not finite."""
    logprobs: list[TokenLogprobs | None] = []
    """Empty, or one for each sampled sequence; None where none were asked for."""
    forward_s: float = 0.0
    """Seconds that the step took but for its swaps; 0 if that was not measured."""
    swap_s: float = 0.0
    """Seconds that its swap-outs and swap-ins took."""


class StepAck(msgspec.Struct, frozen=True, array_like=True, tag="ack"):
    """A rank other than 0 has finished a step, its block copies included."""

    step: int


class WorkerFailure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """A rank's last words."""

    text: str


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """The rank is to end its loop."""


ControllerMessage = StepPlan | StepMasks | EmbedPlan | Shutdown
WorkerMessage = StepOutput | EmbedOutput | StepAck | WorkerFailure
