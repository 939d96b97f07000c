"""The messages between controller and worker.

A plan holds changes only. A sequence has a row from its start to its end; the worker
keeps the row's tokens, block table and sampling state, and appends the tokens that it
samples, so that the controller can send plan k + 1 before it has seen the tokens of
step k. The end of a sequence is not sent: its row is absent from later plans until
another sequence starts in it.

A rank executes a plan in this order: starts, copies of blocks on the device, forward pass, late
copies of states, sampling. Plans are executed in the order in which they are sent, so a block may
go to another sequence in the plan after its last use.

Copies between the pools (evictions, swap-outs, swap-ins) run concurrently with steps: they begin
after all earlier steps, and have ended once every rank has acknowledged the step. Until then, no
plan uses a block that one of them reads or writes. The sources of evictions are the exception:
anything in the same plan or later may overwrite them.

A block table has an entry for every `block_size` tokens: a block in each group of layers of the
cache. Tables are flattened entry by entry, `[num_entries, num_groups]`; uniform models have one
group. A sequence frees the blocks behind the window of a group without a message: their places are
not read any more, and the blocks may go to another sequence in the same plan.

The recurrent state of row `r` of a model with such states, its live state, is in the
`CacheSize.state_blocks` (`n`) device blocks from `num_blocks + r * n` on, behind the blocks of the
pool. The tokens of a row at position 0 begin with zeros. The row takes in each token once: no plan
computes a token of it again. The live states of all rows are followed by spare states of
the same size (`StepLimits.num_spare_states`), where the forward pass saves states within chunks.

Reads and writes of files depend on no step: they begin when the plan arrives, and a `DiskReport` of
every rank ends them. Until then, no plan writes a CPU block that they read, or uses one that they
write.
"""

from __future__ import annotations

import struct
from array import array
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from pagedray.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "TOKEN_ID_BYTES",
    "BlockCopy",
    "ControllerMessage",
    "Decodes",
    "DiskReport",
    "Pooling",
    "PromptLogprobs",
    "PromptToken",
    "RankLogLine",
    "SequencePlan",
    "SequenceStart",
    "Shutdown",
    "StateSave",
    "StepAck",
    "StepMasks",
    "StepOutput",
    "StepPlan",
    "TextBatch",
    "TokenLogprobs",
    "WorkerFailure",
    "WorkerMessage",
    "pack_token_ids",
]

TOKEN_ID_BYTES = 4
"""Bytes of each token id in the result of `pack_token_ids`."""


class Decodes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sequences that compute only their last token in a step, and sample the next token.

    Every field has int32 in native byte order.

    A *chain* is a sequence with drafts, guesses of its next tokens that the step also computes:
    consecutive decodes of its row with rising positions, the first of its last known token. Each
    samples the token after its own, so a draft is right if the decode before it samples the same
    token. Chains follow all other decodes.
    """

    rows: bytes = b""
    """`[num_decodes]`; a row of a chain is repeated for each draft."""
    positions: bytes = b""
    """`[num_decodes]`: of the tokens that are computed."""
    growing_rows: bytes = b""
    """`[num_growing]`: the rows with a token that is the first in its block; rows may be repeated,
    and with a draft head, rows of chunks are among them."""
    new_block_ids: bytes = b""
    """`[num_growing, num_groups]`: appended to the block tables of these rows before the forward
    pass."""
    draft_ids: bytes = b""
    """`[num_drafts]`: the tokens of the drafts, in the order of the decodes; empty if the plan is
    overlapped."""

    @classmethod
    def pack(
        cls,
        rows: Sequence[int],
        positions: Sequence[int],
        growing_rows: Sequence[int] = (),
        new_block_ids: Sequence[int] = (),
        draft_ids: Sequence[int] = (),
    ) -> Decodes:
        """Return decodes of the given rows."""
        return cls(
            _pack(rows),
            _pack(positions),
            _pack(growing_rows),
            _pack(new_block_ids),
            _pack(draft_ids),
        )

    def __len__(self) -> int:
        return len(self.rows) // 4

    @property
    def num_pairs(self) -> int:
        """Pairs of a token and a token that it attends to."""
        return sum(array("i", self.positions)) + len(self)


def _pack(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"{len(numbers)}i", *numbers) if numbers else b""


class BlockCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A copy of one block from `source` to `target`; the field that holds it implies the pools."""

    source: int
    target: int


def pack_token_ids(token_ids: Sequence[int] | array[int]) -> bytes:
    """Return token ids as int32 in native byte order."""
    return array("i", token_ids).tobytes()


class SequenceStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence enters the batch, for the first time or after preemption."""

    row: int
    """A row in `[0, max_num_seqs)`; its previous sequence has ended."""
    token_ids: bytes
    """All tokens known so far: the prompt, then sampled tokens, as `pack_token_ids` returns them,
    which takes far less time than a list. Empty if it has a donor."""
    num_prompt_tokens: int
    block_ids: list[int]
    """The block table so far, cached and swapped-in blocks included, `[num_entries, num_groups]`;
    -1 in place of blocks behind the window of their group. If it has a donor, only the entry of the
    last token of the prompt: the donor's entries before that entry precede it."""
    sampling: SamplingParams
    seed: int
    index: int
    """The index of the sequence among the sequences of its request."""
    eos_token_ids: tuple[int, ...] = ()
    """Not sampled before `min_tokens` tokens."""
    mask_start: int | None = None
    """Number of generated tokens after which each step samples under a mask, which also enforces
    `min_tokens` from then on; None is never."""
    donor_row: int = -1
    """Row of a running sequence that has the same prompt, for a fork; -1 is none."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that must not be generated: the last token of each is never sampled after
    the others."""


# Plans are never part of a reference cycle, so the garbage collector need not track their parts.
class SequencePlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of a sequence that a step computes, at least one."""

    row: int
    first_position: int
    num_tokens: int
    is_sampled: bool
    """Whether the step samples the next token."""
    new_block_ids: tuple[int, ...] = ()
    """`[num_new_entries, num_groups]`: appended to the row's block table before the forward
    pass."""

    @property
    def num_pairs(self) -> int:
        """Pairs of a token and a token that it attends to."""
        return self.num_tokens * self.first_position + self.num_tokens * (self.num_tokens + 1) // 2


Pooling = Literal["mean", "cls", "last"]
"""How a text's hidden states become its vector: the mean of all, the first, the last."""


class TextBatch(msgspec.Struct, frozen=True, array_like=True):
    """The texts, or pairs of texts, that become vectors or scores in one step."""

    token_ids: list[list[int]]
    """The tokens of each text, at least one."""
    pooling: Pooling
    is_normalized: bool
    """Whether vectors are scaled to length 1."""
    num_first_type: list[int] = []
    """How many tokens of each text are of type 0; the others, of the second text of a pair, are of
    type 1. If empty, all are of type 0."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(map(len, self.token_ids))


class StateSave(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A recurrent state within a chunk that the forward pass copies to a spare state."""

    row: int
    position: int
    """The number of tokens of the row that are in the state. It is within the chunk of the row, a
    multiple of `CacheSize.state_grid` behind its first position."""


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """The work of one step."""

    step: int
    """Increases by one within an epoch."""
    chunks: list[SequencePlan]
    """Sequences of several tokens, then sequences of a single token."""
    starts: list[SequenceStart] = []
    decodes: Decodes = Decodes()
    """Decodes, which follow the chunks in the batch. Each could also be a chunk of one token."""
    swap_outs: list[BlockCopy] = []
    """Device block to CPU block."""
    swap_ins: list[BlockCopy] = []
    """CPU block to device block."""
    copies: list[BlockCopy] = []
    """Device block to device block: copy-on-write, and recurrent states to or from live states."""
    evictions: list[BlockCopy] = []
    """Device block to CPU block: cached blocks, and live states of preempted sequences, that
    anything else in the plan may overwrite."""
    disk_reads: list[BlockCopy] = []
    """Disk block to CPU block."""
    disk_writes: list[BlockCopy] = []
    """CPU block to disk block."""
    texts: TextBatch | None = None
    """The texts of a model that makes embeddings, with which nothing else is in the plan."""
    saves: list[StateSave] = []
    """The states that the forward pass saves, the first to the first spare state."""
    late_copies: list[BlockCopy] = []
    """Device block to device block, after the forward pass: spare states or live states to
    snapshots."""
    num_drafts: int = 0
    """Tokens that a draft head guesses for each sequence behind its sampled tokens."""
    is_overlapped: bool = False
    """Whether the plan was made before the tokens of the step before were known.

    It has only decodes, of sequences of that step, at the positions that follow if all drafts of
    that step are right: each position is too high by the number of wrong drafts of its row. Chains
    have no `draft_ids`: their drafts are the first guesses of the draft head behind that step."""
    feeds_head: bool = True
    """Whether a draft head reads the tokens of the step; if not, it guesses none."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes, of all sequences."""
        if self.texts is not None:
            return self.texts.num_tokens
        return sum(chunk.num_tokens for chunk in self.chunks) + len(self.decodes)

    @property
    def num_sampled(self) -> int:
        """Tokens that the step samples."""
        if not self.chunks:
            return len(self.decodes)
        return sum(chunk.is_sampled for chunk in self.chunks) + len(self.decodes)

    @property
    def sequences(self) -> list[SequencePlan]:
        """All sequences in their order, decodes as chunks, which takes long if there are many."""
        rows, positions = array("i", self.decodes.rows), array("i", self.decodes.positions)
        growing_rows = array("i", self.decodes.growing_rows)
        added = array("i", self.decodes.new_block_ids)
        num_groups = len(added) // max(len(growing_rows), 1)
        grown: dict[int, tuple[int, ...]] = {}
        for index, row in enumerate(growing_rows):
            blocks = tuple(added[index * num_groups : (index + 1) * num_groups])
            grown[row] = grown.get(row, ()) + blocks
        chunks = self.chunks
        if grown and chunks:
            chunks = [
                msgspec.structs.replace(
                    one, new_block_ids=one.new_block_ids + grown.pop(one.row, ())
                )
                for one in chunks
            ]
        # The first decode of a chain takes all blocks.
        decodes = [
            SequencePlan(row, position, 1, True, grown.pop(row, ()))
            for row, position in zip(rows, positions, strict=True)
        ]
        return chunks + decodes


class StepMasks(msgspec.Struct, frozen=True, array_like=True, tag="masks"):
    """The tokens that masked sequences of a step may sample.

    Sent after the step's plan and before the next plan, once the tokens of all earlier steps are
    known; the forward pass does not wait for it.
    """

    step: int
    words: bytes
    """int32 in native byte order, `[num_masked, ceil(vocab_size / 32)]`, in the plan's order: bit
    `i % 32` of word `i // 32` is set if token `i` may be sampled. A sequence without a mask in time
    has no bit set and samples -1; a later plan computes its last token again.
    """
    released: list[int] = []
    """Indices of the masked sequences that sample without masks in later steps."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, before temperature and penalties."""

    chosen: float
    token_ids: list[int]
    """The most likely tokens, in descending order."""
    logprobs: list[float]


class PromptToken(NamedTuple):
    """The log-probability of one token of a prompt, given the tokens before it."""

    chosen: float
    rank: int
    """1 for the most likely token."""
    token_ids: list[int]
    """The most likely tokens, in descending order."""
    logprobs: list[float]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of consecutive tokens of a prompt, given the tokens before each."""

    row: int
    """The row of the sequence in the step that computed them."""
    first_position: int
    """Position of the first token, 1 or more: nothing precedes the token at position 0."""
    num_likeliest: int
    chosen: bytes
    """float32 in native byte order, `[num_tokens]`: of the prompt's own tokens."""
    ranks: bytes
    """int32, `[num_tokens]`: 1 for the most likely token."""
    token_ids: bytes
    """int32, `[num_tokens, num_likeliest]`: the most likely tokens, in descending order."""
    logprobs: bytes
    """float32, `[num_tokens, num_likeliest]`."""

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.first_position + len(self.chosen) // 4

    def tokens(self) -> Iterator[PromptToken]:
        """Return the log-probabilities of each token."""
        width = self.num_likeliest
        token_ids, logprobs = array("i", self.token_ids), array("f", self.logprobs)
        chosen, ranks = array("f", self.chosen), array("i", self.ranks)
        for index, (logprob, rank) in enumerate(zip(chosen, ranks, strict=True)):
            part = slice(index * width, (index + 1) * width)
            yield PromptToken(logprob, rank, token_ids[part].tolist(), logprobs[part].tolist())


class StepOutput(msgspec.Struct, frozen=True, array_like=True, tag="output"):
    """Rank 0's result of a `StepPlan`."""

    step: int
    token_ids: list[int]
    """The token of each sampled sequence, in the plan's order; -1 if its logits were not finite, or
    if its mask allowed no token. A chain has a token for each of its decodes."""
    logprobs: list[TokenLogprobs | None] = []
    """Empty, or by token; None if not requested."""
    forward_s: float = 0.0
    """Duration of the step without copies between the pools, in seconds; 0 if not measured."""
    swap_s: float = 0.0
    """Duration of the copies of `num_swapped` blocks between the pools, in seconds."""
    prompt_logprobs: list[PromptLogprobs] = []
    """Log-probabilities of prompts that requested them and of which the step computed tokens."""
    num_swapped: int = 0
    """Blocks copied between the pools by this step or earlier steps, except blocks in earlier
    outputs.
    """
    is_acknowledged: bool = True
    """Whether its block copies have ended too; if not, a `StepAck` follows."""
    vectors: bytes = b""
    """Of each text, float32 in native byte order, `[num_texts, ModelConfig.vector_size]`."""
    draft_ids: bytes = b""
    """int32 in native byte order, `[num_sequences, StepPlan.num_drafts]`: guesses of the tokens
    that follow the tokens of each sampled sequence. Those of a chain follow the token after its
    last right draft."""
    idle_s: float = 0.0
    """How long the rank had no step to compute before this step, in seconds; 0 if not measured."""


class StepAck(msgspec.Struct, frozen=True, array_like=True, tag="ack"):
    """A rank has finished a step, its block copies included, and all earlier steps.

    Rank 0 sends it only if the step's output did not say so.
    """

    step: int


class DiskReport(msgspec.Struct, frozen=True, array_like=True, tag="disk"):
    """A rank has ended the reads of a plan from its file, or the writes to it.

    Each plan with reads gets a report, and each plan with writes, in the order of plans for each
    kind.
    """

    step: int
    is_read: bool
    failed: list[int] = []
    """The disk blocks that could not be read or written."""
    seconds: float = 0.0
    """The duration of these reads or writes."""


class RankLogLine(msgspec.Struct, frozen=True, array_like=True, tag="log"):
    """A log line of a rank, for the log of the controller."""

    level: int
    """As in `logging`."""
    text: str


class WorkerFailure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """The traceback of a rank that failed, which is its last message."""

    text: str
    is_peer: bool = False
    """Whether it failed only because another rank has left the group."""


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Ends the rank's loop."""


ControllerMessage = StepPlan | StepMasks | Shutdown


WorkerMessage = StepOutput | StepAck | DiskReport | RankLogLine | WorkerFailure
