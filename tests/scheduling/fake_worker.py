"""A worker whose cache holds fingerprints instead of keys and values.

The fingerprint at a position stands for its tenant and every token up to it, as real
keys and values do. Plans are carried out in the order that `pagedray.batch` documents. Swaps
are as late as they may be: a block gets its content when the step is acknowledged, and
what it had is destroyed when the step runs. So is the source of an eviction, which the plan may
overwrite. What is read from the disk or written to it has its place at the report, and none from
when the plan arrives. The worker checks everything it can observe.

In several groups of layers, each has fingerprints of its own. A query must find the right content
in every block that the window of the group shows it; what lies behind the window may be anything.

With recurrent states, the blocks behind the pool are the live states of rows: every slot of a part
stands for the tokens that the row has taken in. A chunk must find exactly the tokens before it. The
states that chunks save behind them are gone after the step. A row takes in the accepted tokens of a
chain when it has sampled.

A draft head guesses tokens behind sampled tokens. An overlapped plan computes its guesses of the
step before, which only the worker knows, as well as how many drafts of that step were wrong.

From a position on, the values of a sequence may be bad, as NaN is: whatever is computed on top of
them is bad too, and so are the logits.
"""

import random
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from pagedray.batch import (
    BlockCopy,
    DiskReport,
    SequencePlan,
    SequenceStart,
    StepOutput,
    StepPlan,
    pack_token_ids,
)
from pagedray.config import StepLimits
from pagedray.request import FinishReason, Request

VOCAB_SIZE = 11
EOS = 3


@dataclass(frozen=True, slots=True)
class BadValue:
    """What a slot has in place of a fingerprint."""

    seed: int
    index: int
    """The sequence that it comes from."""


Block = list[int | BadValue | None]


def next_fingerprint(parent: int, token_id: int) -> int:
    """Return the fingerprint at the position after that of `parent`."""
    return hash((parent, token_id, 0x5EED))


def fingerprints(tenant: str, token_ids: Sequence[int]) -> list[int]:
    """Return the expected cache content of tokens, `[num_tokens]`."""
    chain = [first_parent(tenant)]
    for token_id in token_ids:
        chain.append(next_fingerprint(chain[-1], token_id))
    return chain[1:]


def in_group(fingerprint: int, group: int) -> int:
    """Return what a group of layers keeps for a fingerprint."""
    return hash((fingerprint, group)) if group else fingerprint


def in_state(chain: Sequence[int], num_tokens: int, part: int) -> int:
    """Return what a part of the recurrent state keeps after the first tokens."""
    return hash((chain[num_tokens - 1] if num_tokens else 0, part, "state"))


def first_parent(tenant: str) -> int:
    """Return the fingerprint before a tenant's first token."""
    return int.from_bytes(tenant.encode()) + 1


def sample(fingerprint: int, *, seed: int, index: int, is_eos_allowed: bool) -> int:
    """Return the next token, sometimes an end-of-sequence token."""
    token_id = hash((fingerprint, seed, index)) % VOCAB_SIZE
    return (token_id + 1) if token_id == EOS and not is_eos_allowed else token_id


def undisturbed(
    request: Request, index: int, *, max_model_len: int, bad_length: int | None
) -> tuple[list[int], FinishReason]:
    """Return the expected tokens and end of a sequence."""
    sampling = request.sampling
    stop_token_ids = {*sampling.stop_token_ids}
    if not sampling.ignore_eos:
        stop_token_ids |= {*request.eos_token_ids}
    num_prompt_tokens = len(request.prompt_token_ids)
    token_ids = list(request.prompt_token_ids)
    chain = fingerprints(request.tenant, token_ids)
    while len(token_ids) < min(max_model_len, num_prompt_tokens + sampling.max_tokens):
        if len(token_ids) == bad_length:
            return token_ids[num_prompt_tokens:], FinishReason.ERROR
        may_end = len(token_ids) - num_prompt_tokens >= sampling.min_tokens
        token_id = sample(
            chain[-1], seed=request.seed, index=index, is_eos_allowed=may_end or sampling.ignore_eos
        )
        token_ids.append(token_id)
        chain.append(next_fingerprint(chain[-1], token_id))
        if token_id in stop_token_ids and may_end:
            return token_ids[num_prompt_tokens:], FinishReason.STOP
    return token_ids[num_prompt_tokens:], FinishReason.LENGTH


def known_tokens(start: SequenceStart) -> list[int]:
    """Return the tokens with which a sequence starts."""
    return array("i", start.token_ids).tolist()


class _Row:
    """The worker's state of a sequence."""

    def __init__(self, start: SequenceStart, tenant: str) -> None:
        self.start = start
        self.token_ids = known_tokens(start)
        self.block_ids = list(start.block_ids)
        self.bad: BadValue | None = None
        """What it has read or computed, if that is bad."""
        self.bad_position = 0
        """The position from which on what it computes is bad, if it is."""
        self.has_read_hits = False
        self.next_position: int | None = None
        """The position of its next query; None before its first plan."""
        self.chain = fingerprints(tenant, self.token_ids)

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.chain.append(next_fingerprint(self.chain[-1], token_id))

    def truncate(self, num_tokens: int) -> None:
        """Forget all tokens but the first."""
        del self.token_ids[num_tokens:], self.chain[num_tokens:]
        if self.bad is not None and self.bad_position >= num_tokens:
            self.bad = None


def joined(plan: StepPlan) -> list[SequencePlan]:
    """Return the sequences of a plan, each chain of drafts as a chunk."""
    sequences: list[SequencePlan] = []
    for one in plan.sequences:
        last = sequences[-1] if sequences else None
        if last is None or last.row != one.row:
            sequences.append(one)
        else:
            assert one.first_position == last.first_position + last.num_tokens
            assert not one.new_block_ids
            sequences[-1] = msgspec.structs.replace(last, num_tokens=last.num_tokens + 1)
    return sequences


@dataclass(slots=True, kw_only=True)
class SeedRecords:
    """What is known of requests by their seeds, since a plan names neither requests nor tenants."""

    tenants: dict[int, str] = field(default_factory=dict)
    bad_lengths: dict[int, int] = field(default_factory=dict)
    """The length at which logits are not finite."""
    bad_positions: dict[int, int] = field(default_factory=dict)
    """The position from which on values are bad."""
    bad_sequences: set[tuple[int, int]] = field(default_factory=set)
    """Seed and index of the sequences that sampled from bad values."""


class FakeWorker:
    """Runs plans, one per call."""

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        num_cpu_blocks: int,
        cpu_blocks: list[Block] | None = None,
        num_disk_blocks: int = 0,
        max_num_seqs: int,
        seeds: SeedRecords,
        block_copy_s: float = 0.0,
        token_s: float = 0.0,
        windows: tuple[int | None, ...] = (None,),
        state_blocks: int = 0,
        right: float = 0.7,
        max_model_len: int,
    ) -> None:
        """`cpu_blocks` are those of a pool that outlived another worker.

        Each guess of the draft head is right with probability `right`.
        """
        self._windows = windows
        self._right = right
        self._max_model_len = max_model_len
        self._rng = random.Random(max_num_seqs)
        self._num_refused: dict[int, int] = {}
        """By row that the last step decoded, its drafts that were wrong."""
        self._guesses: dict[int, list[int]] = {}
        """By row that the last step sampled, the guesses of the draft head."""
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self._seeds = seeds
        self.bad_outputs: deque[set[BadValue]] = deque()
        """For each output, what the logits came from that were bad."""
        self._known_bad: deque[set[BadValue]] = deque()
        self.num_sampled: dict[int, dict[int, int]] = {}
        """By step, how many tokens the rows sample of which some masks were late."""
        self._block_copy_s = block_copy_s
        self._token_s = token_s
        self.num_blocks = num_blocks
        self.state_blocks = state_blocks
        self._most_drafts = 0
        """Entries that a block table may have beyond its tokens, for drafts that were wrong."""
        self._num_spares = StepLimits(max_num_seqs=max_num_seqs).num_spare_states
        self.device: list[Block] = [
            [None] * block_size
            for _ in range(num_blocks + (max_num_seqs + self._num_spares) * state_blocks)
        ]
        self.cpu: list[Block] = cpu_blocks or [[None] * block_size for _ in range(num_cpu_blocks)]
        self.disk: list[Block] = [[None] * block_size for _ in range(num_disk_blocks)]
        self.disk_jobs: dict[bool, deque[tuple[int, list[tuple[BlockCopy, Block]]]]] = {
            False: deque(),
            True: deque(),
        }
        """Writes and reads that have begun: their steps, copies and what these copy."""
        self.rows: dict[int, _Row] = {}
        self.plans: deque[StepPlan] = deque()
        self._held_rows: deque[set[int]] = deque()
        self.outputs: deque[StepOutput] = deque()
        self.executed_step = -1
        self._pending_evictions: deque[tuple[int, int, Block]] = deque()
        self._pending_swaps: list[tuple[int, list[Block], int, list[Block], int, Block]] = []

    def send(self, plan: StepPlan, held_rows: set[int], known_bad: set[BadValue]) -> None:
        """Queue a plan, with the rows that sequences hold after it, which no plan contains.

        A sequence that it starts must not read values of `known_bad`.
        """
        self.plans.append(plan)
        self._held_rows.append(held_rows)
        self._known_bad.append(known_bad)

    def begin_disk_jobs(self, plan: StepPlan) -> None:
        """Begin the reads and writes of a plan that arrives."""
        for is_read, copies in ((False, plan.disk_writes), (True, plan.disk_reads)):
            sources, targets = (self.disk, self.cpu) if is_read else (self.cpu, self.disk)
            begun = [(copy, list(sources[copy.source])) for copy in copies]
            for copy in copies:
                targets[copy.target] = [None] * self.block_size
            if begun:
                self.disk_jobs[is_read].append((plan.step, begun))

    def end_disk_job(self, report: DiskReport) -> None:
        """Do what every rank has reported of the oldest reads or writes."""
        step, begun = self.disk_jobs[report.is_read].popleft()
        assert step == report.step
        sources, targets = (self.disk, self.cpu) if report.is_read else (self.cpu, self.disk)
        for copy, content in begun:
            assert sources[copy.source] == content, "what is copied from or to the disk changed"
            assert targets[copy.target] == [None] * self.block_size, "its place was written"
            if (copy.source if report.is_read else copy.target) not in report.failed:
                targets[copy.target] = content

    def execute(self) -> None:
        """Run the oldest plan."""
        plan = self.plans.popleft()
        assert plan.step == self.executed_step + 1
        if plan.is_overlapped:
            plan = self._resolved(plan)
        # There may be blocks for the drafts of two steps, and for guesses behind them.
        self._most_drafts = max(self._most_drafts, 3 * plan.num_drafts + 1)
        # Live rows share no block with ended ones.
        for row in self.rows.keys() - self._held_rows.popleft():
            del self.rows[row]
        for start in plan.starts:
            self._start_row(start)
        self._copy_blocks(plan)
        sequences = joined(plan)
        chains = self._add_drafts(plan, sequences)
        for sequence in sequences:
            self.rows[sequence.row].block_ids += sequence.new_block_ids
        if plan.is_overlapped:
            self._check_bounds(sequences)
        known_bad = self._known_bad.popleft()
        # Siblings share a prompt and its fate.
        started = {start.row for start in plan.starts if start.index == 0}
        for sequence in sequences:
            found = self._bad_hit(self.rows[sequence.row], sequence.first_position)
            # What was swapped out comes back as it was.
            is_new = sequence.row in started
            assert not (is_new and found in known_bad), "a block that is known to be bad was found"
        for sequence in sequences:
            self.rows[sequence.row].next_position = sequence.first_position
            self._check_state(sequence)
        self._write(sequences)
        for sequence in sequences:
            self._attend(sequence)
        assert not (self.state_blocks and chains and plan.chunks), "prompts beside chains"
        for sequence in sequences:
            if sequence.row not in chains:
                self._take_in(sequence)
        self._save_states(plan)
        self._copy_on_device(plan.late_copies)
        num_sampled = self.num_sampled.pop(plan.step, {})
        late_rows = {row for row, number in num_sampled.items() if not number}
        assert not (late_rows and self.state_blocks), "a row will take a token in twice"
        for sequence in sequences:
            end = sequence.first_position + sequence.num_tokens
            self.rows[sequence.row].next_position = end - (sequence.row in late_rows)
        sampled = [one for one in sequences if one.is_sampled]
        token_ids = []
        for one in sampled:
            if one.row in late_rows:
                token_ids += [-1] * (one.num_tokens if one.row in chains else 1)
                self._drop_drafts(one, chains)
            elif one.row in chains:
                most = num_sampled.get(one.row, one.num_tokens)
                token_ids += self._sample_chain(one, most=most)
                self._accept(one)
            else:
                token_ids.append(self._sample(one))
        self._num_refused = {} if plan.chunks else self._refused(sampled, late_rows)
        guesses = [self._guess(self.rows[one.row], plan.num_drafts) for one in sampled]
        self._guesses = dict(zip((one.row for one in sampled), guesses, strict=True))
        rows = [self.rows[one.row] for one in sampled if one.row not in late_rows]
        self.bad_outputs.append({row.bad for row in rows if row.bad is not None})
        num_copies = len(plan.evictions) + len(plan.swap_outs) + len(plan.swap_ins)
        self.outputs.append(
            StepOutput(
                plan.step,
                token_ids,
                forward_s=plan.num_tokens * self._token_s,
                swap_s=num_copies * self._block_copy_s,
                num_swapped=num_copies,
                draft_ids=pack_token_ids([one for ids in guesses for one in ids]),
            )
        )
        self.executed_step = plan.step

    def _resolved(self, plan: StepPlan) -> StepPlan:
        """Return an overlapped plan with the positions and drafts that are known at last."""
        parts = (plan.chunks, plan.starts, plan.swap_outs, plan.swap_ins, plan.copies, plan.saves)
        assert not any((*parts, plan.late_copies, plan.disk_reads))
        rows = array("i", plan.decodes.rows)
        assert self._num_refused.keys() >= {*rows}, "a row was not decoded by the step before"
        positions = [
            position - self._num_refused[row]
            for row, position in zip(rows, array("i", plan.decodes.positions), strict=True)
        ]
        packed_ids = plan.decodes.draft_ids
        for one in () if packed_ids else joined(plan):
            guesses = self._guesses[one.row]
            assert one.num_tokens <= len(guesses) + 1, "a draft was not guessed"
            packed_ids += pack_token_ids(guesses[: one.num_tokens - 1])
        decodes = msgspec.structs.replace(
            plan.decodes, positions=pack_token_ids(positions), draft_ids=packed_ids
        )
        return msgspec.structs.replace(plan, decodes=decodes)

    def _check_bounds(self, sequences: list[SequencePlan]) -> None:
        """Check that rows have slots, and tokens to sample, as if no draft had been wrong."""
        for one in sequences:
            row, num_refused = self.rows[one.row], self._num_refused[one.row]
            end = one.first_position + num_refused + one.num_tokens
            assert end * len(self._windows) <= len(row.block_ids) * self.block_size
            assert end < self._max_model_len
            self._most_drafts = max(self._most_drafts, num_refused + one.num_tokens - 1)

    def _refused(self, sampled: list[SequencePlan], late_rows: set[int]) -> dict[int, int]:
        """Return the number of wrong drafts of each row that samples."""
        ends = {one.row: one.first_position + one.num_tokens for one in sampled}
        return {
            row: end - len(self.rows[row].token_ids) + 1
            for row, end in ends.items()
            if row not in late_rows
        }

    def _guess(self, row: _Row, number: int) -> list[int]:
        """Return guesses of the next tokens of a row, some of which are wrong."""
        guesses: list[int] = []
        parent, seed, index = row.chain[-1], row.start.seed, row.start.index
        for _ in range(number):
            token_id = sample(parent, seed=seed, index=index, is_eos_allowed=True)
            if self._rng.random() > self._right:
                token_id = self._rng.randrange(VOCAB_SIZE)
            guesses.append(token_id)
            parent = next_fingerprint(parent, token_id)
        return guesses

    def finish_swaps(self, step: int) -> None:
        """Make the copies of all steps up to `step`."""
        while self._pending_evictions and self._pending_evictions[0][0] <= step:
            _, block, evicted = self._pending_evictions.popleft()
            assert self.cpu[block] == [None] * self.block_size, "the target was written"
            self.cpu[block] = evicted
        while self._pending_swaps and self._pending_swaps[0][0] <= step:
            _, sources, source, targets, target, content = self._pending_swaps.pop(0)
            assert sources[source] == content, "the source of a swap was overwritten"
            assert targets[target] == [None] * self.block_size, "a swap's target was written"
            targets[target] = list(content)

    def _start_row(self, start: SequenceStart) -> None:
        assert 0 <= start.row < self.max_num_seqs
        present = [block for block in start.block_ids if block >= 0]
        assert len(set(present)) == len(present)
        if start.donor_row >= 0:
            donor = self.rows[start.donor_row]
            assert start.token_ids == b""
            assert donor.start.seed == start.seed
            prompt = donor.token_ids[: start.num_prompt_tokens]
            num_shared = (start.num_prompt_tokens - 1) // self.block_size * len(self._windows)
            start = msgspec.structs.replace(
                start,
                token_ids=pack_token_ids(prompt),
                block_ids=donor.block_ids[:num_shared] + start.block_ids,
            )
        row = self.rows[start.row] = _Row(start, self._seeds.tenants[start.seed])
        if start.donor_row >= 0:
            row.next_position = start.num_prompt_tokens - 1

    def _copy_blocks(self, plan: StepPlan) -> None:
        for copy in plan.evictions:
            self._evict(plan.step, copy)
        for copy in plan.swap_outs:
            self._swap(plan.step, self.device, self.cpu, copy)
        for copy in plan.swap_ins:
            self._swap(plan.step, self.cpu, self.device, copy)
        self._copy_on_device(plan.copies)

    def _copy_on_device(self, copies: list[BlockCopy]) -> None:
        targets = [copy.target for copy in copies]
        assert len(set(targets)) == len(targets)
        for copy in copies:
            assert copy.source not in targets
            self.device[copy.target] = list(self.device[copy.source])

    def _evict(self, step: int, copy: BlockCopy) -> None:
        """Copy a block whose source may be overwritten at once."""
        content = list(self.device[copy.source])
        is_live = copy.source >= self.num_blocks
        is_bad = any(isinstance(value, BadValue) for value in content)
        assert is_live or not is_bad, "bad values are kept"
        self.device[copy.source] = [None] * self.block_size
        self.cpu[copy.target] = [None] * self.block_size
        self._pending_evictions.append((step, copy.target, content))

    def _swap(self, step: int, sources: list[Block], targets: list[Block], copy: BlockCopy) -> None:
        content = list(sources[copy.source])
        targets[copy.target] = [None] * self.block_size
        self._pending_swaps.append((step, sources, copy.source, targets, copy.target, content))

    def _add_drafts(self, plan: StepPlan, sequences: list[SequencePlan]) -> set[int]:
        """Add drafts to the tokens of their rows, and return these rows."""
        draft_ids = array("i", plan.decodes.draft_ids).tolist()
        decoded = {*array("i", plan.decodes.rows)}
        chains = [one for one in sequences if one.row in decoded and one.num_tokens > 1]
        assert chains == sequences[len(sequences) - len(chains) :], "chains are not the last"
        for one in chains:
            row = self.rows[one.row]
            assert len(row.token_ids) == one.first_position + 1
            for _ in range(one.num_tokens - 1):
                row.append(draft_ids.pop(0))
        assert not draft_ids
        return {one.row for one in chains}

    def _write(self, sequences: list[SequencePlan]) -> None:
        written: set[tuple[int, int]] = set()
        for plan in sequences:
            row = self.rows[plan.row]
            end = plan.first_position + plan.num_tokens
            assert plan.num_tokens >= 1
            assert end <= len(row.token_ids), "a token is computed before it is known"
            num_groups = len(self._windows)
            num_blocks = -(-end // self.block_size) * num_groups
            assert num_blocks <= len(row.block_ids) <= num_blocks + self._most_drafts * num_groups
            for position in range(plan.first_position, end):
                value = self._value(row, position)
                for group in range(num_groups):
                    block, slot = self._slot(row, position, group)
                    assert block >= 0, "a token has no block"
                    assert (block, slot) not in written, "two sequences write to one slot"
                    written.add((block, slot))
                    self.device[block][slot] = (
                        in_group(value, group) if isinstance(value, int) else value
                    )
        owners: dict[int, int] = {}
        for row in self.rows.values():
            for block in self._seen_blocks(row):
                owners[block] = owners.get(block, 0) + 1
        assert all(owners[block] == 1 for block, _ in written), "a shared block is written"

    def _attend(self, plan: SequencePlan) -> None:
        row = self.rows[plan.row]
        if row.bad is not None:
            return
        end = plan.first_position + plan.num_tokens
        for group in range(len(self._windows)):
            position = self._first_seen(plan.first_position, group)
            while position < end:
                block, slot = self._slot(row, position, group)
                assert block >= 0, f"position {position} of row {plan.row} has no block"
                found = self.device[block][slot : slot + end - position]
                chain = row.chain[position : position + len(found)]
                expected = [in_group(one, group) for one in chain] if group else chain
                assert found == expected, f"position {position} of row {plan.row} is wrong"
                position += len(found)

    def _live_blocks(self, row: int) -> range:
        first = self.num_blocks + row * self.state_blocks
        return range(first, first + self.state_blocks)

    def _check_state(self, plan: SequencePlan) -> None:
        """Check that the live state of a row has exactly the tokens before a chunk."""
        row = self.rows[plan.row]
        for part, block in enumerate(self._live_blocks(plan.row) if plan.first_position else ()):
            expected = in_state(row.chain, plan.first_position, part)
            for value in self.device[block]:
                if isinstance(value, BadValue):
                    row.bad = row.bad or value
                else:
                    assert value == expected, f"row {plan.row} has another state"

    def _take_in(self, plan: SequencePlan) -> None:
        """Replace the live state of a row, with the tokens of a chunk."""
        row, end = self.rows[plan.row], plan.first_position + plan.num_tokens
        for part, block in enumerate(self._live_blocks(plan.row)):
            value = in_state(row.chain, end, part) if row.bad is None else row.bad
            self.device[block] = [value] * self.block_size

    def _accept(self, plan: SequencePlan) -> None:
        """Let a row take in the tokens of a chain up to the last right draft."""
        position = self.rows[plan.row].next_position
        assert position is not None
        self._take_in(msgspec.structs.replace(plan, num_tokens=position - plan.first_position))

    def _save_states(self, plan: StepPlan) -> None:
        """Save states within chunks; spare states keep nothing from step to step."""
        assert len(plan.saves) <= self._num_spares
        chunks = {one.row: one for one in plan.chunks}
        for spare in range(self._num_spares):
            save = plan.saves[spare] if spare < len(plan.saves) else None
            for part, block in enumerate(self._live_blocks(self.max_num_seqs + spare)):
                self.device[block] = [None] * self.block_size
                if save is not None:
                    distance = save.position - chunks[save.row].first_position
                    assert 0 < distance < chunks[save.row].num_tokens
                    row = self.rows[save.row]
                    value = in_state(row.chain, save.position, part) if row.bad is None else row.bad
                    self.device[block] = [value] * self.block_size

    def _value(self, row: _Row, position: int) -> int | BadValue:
        """Return what a row computes at its next position."""
        seed, index = row.start.seed, row.start.index
        if row.bad is None and position >= self._seeds.bad_positions.get(seed, position + 1):
            row.bad, row.bad_position = BadValue(seed, index), position
        return row.chain[position] if row.bad is None else row.bad

    def _bad_hit(self, row: _Row, num_tokens: int) -> BadValue | None:
        """Return the first bad value that a row finds when it starts, if any."""
        if row.has_read_hits:
            return row.bad
        row.has_read_hits = True
        places = [
            self._slot(row, position, group)
            for group in range(len(self._windows))
            for position in range(self._first_seen(num_tokens, group), num_tokens)
        ]
        if num_tokens:
            places += [(block, 0) for block in self._live_blocks(row.start.row)]
        for block, slot in places:
            found = self.device[block][slot]
            if isinstance(found, BadValue):
                row.bad = found
                return row.bad
        return None

    def _sample(self, plan: SequencePlan) -> int:
        row = self.rows[plan.row]
        length = plan.first_position + plan.num_tokens
        assert length == len(row.token_ids)
        seed, index = row.start.seed, row.start.index
        if row.bad is not None:
            self._seeds.bad_sequences.add((seed, index))
            row.append(0)
            return -1
        if self._seeds.bad_lengths.get(seed) == length:
            row.append(0)
            return -1
        num_sampled = length - row.start.num_prompt_tokens
        is_eos_allowed = (
            EOS not in row.start.eos_token_ids or num_sampled >= row.start.sampling.min_tokens
        )
        token_id = sample(row.chain[-1], seed=seed, index=index, is_eos_allowed=is_eos_allowed)
        row.append(token_id)
        return token_id

    def _drop_drafts(self, plan: SequencePlan, chains: set[int]) -> None:
        """Drop the drafts of a chain of which no token was sampled."""
        if plan.row in chains:
            row = self.rows[plan.row]
            self._most_drafts = max(self._most_drafts, plan.num_tokens - 1)
            row.truncate(plan.first_position + 1)
            row.next_position = plan.first_position

    def _sample_chain(self, plan: SequencePlan, *, most: int) -> list[int]:
        """Return the token after each token of a chain; the row keeps the accepted tokens.

        The first `most` tokens have masks.
        """
        row, first = self.rows[plan.row], plan.first_position
        drafts, bad = row.token_ids[first + 1 :], row.bad
        self._most_drafts = max(self._most_drafts, len(drafts))
        row.truncate(first + 1)
        token_ids: list[int] = []
        for number, draft in enumerate([*drafts, -1][:most], 1):
            if bad is not None and row.bad_position < first + number:
                row.bad = bad
            token_ids.append(self._sample(msgspec.structs.replace(plan, num_tokens=number)))
            row.next_position = first + number
            if token_ids[-1] != draft:
                break
        # Behind a wrong draft, the worker may return any tokens.
        return token_ids + [7] * (most - len(token_ids)) + [-1] * (plan.num_tokens - most)

    def _slot(self, row: _Row, position: int, group: int) -> tuple[int, int]:
        entry, slot = divmod(position, self.block_size)
        return row.block_ids[entry * len(self._windows) + group], slot

    def _first_seen(self, position: int, group: int) -> int:
        """Return the first position that a query sees in a group."""
        window = self._windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def _seen_blocks(self, row: _Row) -> list[int]:
        """Return the blocks of a row that its next query sees, or that it starts with."""
        num_groups = len(self._windows)
        return [
            block
            for place, block in enumerate(row.block_ids)
            if block >= 0
            and (
                row.next_position is None
                or place // num_groups
                >= self._first_seen(row.next_position, place % num_groups) // self.block_size
            )
        ]
