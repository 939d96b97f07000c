"""The messages between the replica and the processes of structured output."""

import msgspec

from cluster.structured.token_matchers import Vocabulary
from pagedray.request import FinishReason, Reasoning

__all__ = [
    "COMPILE",
    "MAKE_MASKS",
    "REJECTED_TOKEN",
    "CompileLimits",
    "Compiled",
    "CompilerStart",
    "Died",
    "GrammarLoaded",
    "GrammarText",
    "LoadFailed",
    "LoadGrammar",
    "MadeMask",
    "MaskQuery",
    "MaskReply",
    "MatcherStart",
    "Rejected",
    "StepQuery",
    "limits_for",
]

COMPILE = b"c"
"""Sent with the socket of a structure."""
MAKE_MASKS = b"m"
"""Sent with the sockets for masks and for grammars."""
REJECTED_TOKEN = "the grammar rejected a token"
"""The error of a sequence with a mask that allowed a token that its grammar rejects."""


class CompileLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of compiling a structure and making its masks."""

    compile_s: float = 10.0
    """CPU time, which does not depend on the load of the machine."""
    wait_s: float = 50.0
    """Wall time, on a busy machine."""
    memory_bytes: int = 512 * 2**20
    answer_bytes: int = 32 * 2**20
    """Size of a compiled grammar as JSON."""
    state_bytes: int = 4 * 2**20
    """Size of the states in that JSON from which a grammar is compiled in the mask process too."""
    repeat_s: float = 1.0
    """CPU time within which it must compile there; otherwise its JSON is sent all the same."""
    mask_memory_bytes: int = 2**30
    """Memory for all grammars in use or cached, and all sequences that follow them."""
    mask_s: float = 0.1
    """CPU time to accept a token and make the next mask, in the trial after compiling."""


def limits_for(compile_s: float) -> CompileLimits:
    """Return the limits that go with a limit of CPU time to compile."""
    return CompileLimits(
        compile_s=compile_s, wait_s=5 * compile_s, repeat_s=compile_s / 10, mask_s=compile_s / 100
    )


class CompilerStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to the process."""

    vocabulary: Vocabulary
    limits: CompileLimits


class GrammarText(msgspec.Struct, frozen=True, array_like=True):
    """The serialized grammar, for the mask process."""

    text: bytes
    """Empty for a grammar that allows every token."""
    is_compiled: bool = True
    """Whether it is JSON of xgrammar; otherwise it is EBNF, which compiles faster than that."""


class Compiled(msgspec.Struct, frozen=True, tag="compiled"):
    """A grammar that was compiled."""

    grammar: GrammarText


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """A structure that was rejected, with the message for its client."""

    message: str


class Died(msgspec.Struct, frozen=True, tag="died"):
    """The fork that compiled was killed by a signal."""

    signal: int


class MatcherStart(msgspec.Struct, frozen=True, array_like=True):
    """Starts a sequence's matcher: its grammar, and other limits of its tokens."""

    grammar_id: int
    min_tokens: int
    ignores_eos: bool
    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    cpu_s: float = 0.0
    """CPU time that the sequence took in another process, if its tokens are replayed."""
    reasoning: Reasoning | None = None
    """The reasoning that may precede the structure."""
    mark: str = ""
    """The beginning that the structure may have, such as a special token."""
    has_text_before_mark: bool = False
    """Whether free text may precede the mark."""
    reasoning_budget: int | None = None
    """Number of tokens after which the reasoning is ended; None does not limit it."""


class MaskQuery(msgspec.Struct, frozen=True, array_like=True):
    """Asks for a mask, and for the masks of the tokens behind drafts."""

    sequence_id: int
    token_ids: list[int]
    """Tokens generated since the last query of the sequence."""
    start: MatcherStart | None = None
    """Set if the process does not know the sequence."""
    draft_ids: list[int] = []
    """Guesses of the tokens that follow."""
    num_forced: int = 0
    """The most tokens of `MadeMask.forced_ids`."""


class StepQuery(msgspec.Struct, frozen=True, array_like=True):
    """Asks for masks of sequences that have received their last masks."""

    queries: list[MaskQuery]
    ended_sequence_ids: list[int]
    ended_grammar_ids: list[int]
    patience_s: float
    """Time to wait for quick masks; masks made by then come in a single reply."""


class MadeMask(msgspec.Struct, frozen=True, array_like=True):
    """A mask, or how its sequence ends."""

    sequence_id: int
    cpu_s: float
    """CPU time that the sequence has taken."""
    mask_cpu_s: float
    """The part of it that this mask took."""
    words: bytes = b""
    """The mask of the next token, then the masks of the tokens behind drafts, as far as made."""
    finish_reason: FinishReason | None = None
    error: str = ""
    """Why the sequence ends with an error."""
    is_offender: bool = False
    """Whether it took too long or too much memory, so that the process exits. Without a finish
    reason, the masks behind drafts did, of which the sequence needs none."""
    is_free: bool = False
    """Whether the sequence needs no other mask, since every token is allowed from here on."""
    forced_ids: list[int] = []
    """Tokens that most likely follow all drafts, since no other text is allowed there."""


class MaskReply(msgspec.Struct, frozen=True, array_like=True):
    """Masks that were made."""

    masks: list[MadeMask]
    is_last: bool = False
    """Whether the process exits; it makes no other mask that was requested."""


class LoadGrammar(msgspec.Struct, frozen=True, array_like=True):
    """Loads a grammar that was compiled."""

    grammar_id: int
    grammar: GrammarText
    ended_grammar_ids: list[int]


class GrammarLoaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded"):
    """The grammar is loaded."""

    num_bytes: int


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The grammar could not be loaded."""

    message: str
    is_out_of_memory: bool
    """Whether it may succeed once other grammars are freed."""
