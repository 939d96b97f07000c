"""The invariants of a scheduler, and of the blocks of the worker that runs its plans."""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from cluster.scheduling.block_pool import BlockPool
from cluster.scheduling.device_tier import group_key, state_key
from cluster.scheduling.scheduler import MAX_PLANS_IN_FLIGHT, Scheduler
from cluster.scheduling.sequence import (
    Arriving,
    Finished,
    Held,
    Placed,
    Quarantined,
    Running,
    SequenceState,
    Swapped,
    Waiting,
)
from cluster.scheduling.sequence import Sequence as ScheduledSequence
from pagedray.batch import BlockCopy, StepPlan
from pagedray.config import SchedulerConfig
from pagedray.request import Request
from tests.scheduling.fake_worker import (
    BadValue,
    FakeWorker,
    fingerprints,
    in_group,
    in_state,
    joined,
)


class Invariants:
    """Checks a scheduler between its operations."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        config: SchedulerConfig,
        block_size: int,
        windows: tuple[int | None, ...],
        requests: Mapping[str, Request],
        sequences: Sequence[ScheduledSequence],
        plans: Sequence[StepPlan],
    ) -> None:
        """The requests, their sequences and the plans are all that there were, and may grow."""
        self._scheduler = scheduler
        assert config.max_num_batched_tokens is not None
        self._max_num_batched_tokens = config.max_num_batched_tokens
        assert config.max_num_seqs is not None
        self._max_num_seqs = config.max_num_seqs
        self._block_size = block_size
        self._windows = windows
        self._requests = requests
        self._sequences = sequences
        self._plans = plans
        self.num_unswapped = 0
        """Sequences seen that left shared blocks behind when they were swapped out."""
        self._started: set[int] = set()
        """Seeds of the requests that have started."""
        self._starved: ScheduledSequence | None = None
        """The starved sequence at the last check."""
        self._num_planned_tokens = 0
        self._open: list[ScheduledSequence] = []
        """Sequences that had not finished at the last check."""
        self._num_seen = 0
        self._num_counted = 0
        self._num_saved = self._num_moved_out = self._num_moved_in = 0
        """Blocks in the plans that were counted."""
        self._expected_content: dict[bytes, list[int]] = {}

    def check(self, worker: FakeWorker) -> None:
        """Check every invariant of the scheduler's state, and of the blocks of its worker."""
        kv = self._scheduler._kv
        self._starved = self._scheduler._planner._preemptor.guard.starved
        # After the check that follows its end, nothing changes in a sequence.
        sequences = [*self._open, *self._sequences[self._num_seen :]]
        holders = [s for s in sequences if not isinstance(s.state, Finished)]
        self._open, self._num_seen = holders, len(self._sequences)
        swaps = list(kv._swaps)
        _check_pool(
            kv.pool,
            references=[
                block
                for sequence in sequences
                for block in (
                    *sequence.blocks.ids,
                    *sequence.blocks.reserved_ids,
                    *_load_ids(sequence),
                )
                if block >= 0
            ],
            pins=[block for swap in swaps for block in swap.block_ids],
        )
        _check_pool(
            kv.cpu_pool,
            references=[
                block
                for one in sequences
                for block in (*_cpu_ids(one), *_state_ids(one))
                if block >= 0
            ],
            pins=[
                *(block for swap in swaps for block in swap.cpu_block_ids),
                *self._blocks_being_saved(),
                *(copy.target for copy in _disk_copies(worker, is_read=True)),
                *(copy.source for copy in _disk_copies(worker, is_read=False)),
            ],
        )
        if kv.disk is not None:
            _check_pool(
                kv.disk.pool,
                references=[],
                pins=[
                    *(copy.source for copy in _disk_copies(worker, is_read=True)),
                    *(copy.target for copy in _disk_copies(worker, is_read=False)),
                ],
            )
        # Once it has started, it may not take rows of others again.
        assert isinstance(self._scheduler._planner._preemptor.pending, Waiting | None)
        if kv.states is not None:
            pending = [one.blocks.states.pending for one in holders if one.blocks.states]
            digests = Counter(digest for one in pending for digest in one.values())
            assert kv.states._num_pending == digests
        self._check_places(holders)
        for sequence in sequences:
            self._note_keys(sequence)
        self._check_cache(worker)
        self._check_stats(holders)
        owners: dict[int, tuple[int, str]] = {}
        for sequence in holders:
            if isinstance(sequence.state, Swapped):
                self.num_unswapped += sequence.state.num_unswapped > 0
            if isinstance(sequence.state, Running):
                assert sequence.num_computed <= sequence.blocks.num_slots
            num_entries, rest = divmod(len(sequence.blocks.ids), len(self._windows))
            assert not rest
            assert sequence.blocks.num_slots == num_entries * self._block_size
            self._check_table(sequence)
            if sequence.num_computed < sequence.unchecked_until:
                assert isinstance(sequence.state, Running)
                assert not sequence.is_prefill
                assert not sequence.is_deferred
                assert sequence.unchecked_until <= sequence.blocks.num_slots
                assert sequence.unchecked_until < sequence.max_length
            in_flight = [one for one in self._scheduler._in_flight if sequence not in one.late]
            num_drafts = sum(
                len(chain.draft_ids)
                for one in in_flight
                for chain in one.chains
                if chain.sequence is sequence
            )
            # Tokens behind the end are dropped.
            limit = self._scheduler._max_model_len if num_drafts else sequence.max_length
            assert sequence.length <= limit
            if num_drafts:
                num_planned = sum(sequence in one.sampled_sequences for one in in_flight)
                assert sequence.num_pending == num_planned + num_drafts
            assert 0 <= sequence.num_pending <= MAX_PLANS_IN_FLIGHT + num_drafts
            tenant = sequence.active.request.tenant
            for place, block in enumerate(sequence.blocks.ids):
                if block >= 0:
                    # A block never changes its group while it is owned.
                    owner = place % len(self._windows), tenant
                    assert owners.setdefault(block, owner) == owner

    def _check_table(self, sequence: ScheduledSequence) -> None:
        """Check that the blocks of a table are missing exactly where they were released.

        These are never blocks that its next query sees, and if a step has just released blocks,
        all others.
        """
        blocks, num_groups = sequence.blocks, len(self._windows)
        num_entries = len(blocks.ids) // num_groups
        if not isinstance(sequence.state, Placed):
            assert not blocks.ids
            assert not blocks.reserved_ids
            return
        for group, window in enumerate(self._windows):
            column = blocks.ids[group::num_groups]
            num_dead = blocks.num_dead[group]
            assert [block < 0 for block in column] == [i < num_dead for i in range(num_entries)]
            if window is None:
                assert num_dead == 0
                continue
            # A late mask may have taken the last token back.
            first_seen = max(0, sequence.num_computed - window + 1)
            assert num_dead <= first_seen // self._block_size
        live = [block for block in blocks.ids if block >= 0] + blocks.reserved_ids
        assert len(set(live)) == len(live), "a sequence owns a block twice"
        most = self._scheduler._kv.groups.blocks_for(
            max(blocks.num_slots, blocks.num_wanted * self._block_size)
        )
        speculator = self._scheduler._speculator
        if speculator is not None and speculator.has_head:
            # Free blocks may be held for the drafts of two steps, and for guesses behind them.
            most += 3 * speculator._num_drafts * num_groups
        assert len(live) <= most, "a sequence has more blocks than were counted for it"

    def check_plan(self, plan: StepPlan, *, is_restricted: bool) -> None:
        """Check a plan: its size, and the order in which requests start unless some may not run."""
        in_flight = self._scheduler._in_flight
        if plan.is_overlapped:
            before, _ = in_flight
            rows = {*array("i", before.plan.decodes.rows)}
            assert rows >= {*array("i", plan.decodes.rows)}
        elif len(in_flight) > 1:
            assert not in_flight[0].chains
        sizes = [sequence.num_tokens for sequence in plan.sequences]
        self._num_planned_tokens += sum(sizes)
        assert sum(sizes) <= self._max_num_batched_tokens
        assert len(sizes) <= self._max_num_seqs
        sequences = joined(plan)
        assert len({sequence.row for sequence in sequences}) == len(sequences)
        assert [size > 1 for size in sizes] == sorted((size > 1 for size in sizes), reverse=True)
        assert sizes or plan.starts or plan.swap_outs or plan.disk_reads
        targets = [copy.target for copy in plan.copies]
        assert len(set(targets)) == len(targets), "two copies have the same target"
        assert not {one.source for one in plan.copies} & set(targets)
        # No block of a state is written by anything else in the plan.
        states = {block for copy in plan.copies for block in (copy.source, copy.target)}
        snapshots = {copy.target for copy in plan.late_copies}
        assert snapshots.isdisjoint(states), "a snapshot is made over another state"
        states |= snapshots
        self._check_saves(plan)
        new = {block for one in plan.sequences for block in one.new_block_ids}
        new |= {one.target for one in plan.swap_ins}
        if self._scheduler._kv.states is not None:
            assert not states & new, "a block of a state is used twice"
            # A sequence may be swapped out with the snapshot that another sequence loads.
            written = states - {copy.source for copy in plan.copies}
            assert not written & {one.source for one in plan.swap_outs}
        # Requests of equal priority and tenant start in order of arrival, but for those that have
        # found too few blocks. Blocks are kept for the starved sequence, which passes requests that
        # awaited a mask when it found too few.
        self._started |= {start.seed for start in plan.starts}
        if is_restricted or not plan.starts:
            return
        by_seed = {request.seed: request for request in self._requests.values()}
        for start in plan.starts:
            request = by_seed[start.seed]
            if self._starved is not None and self._starved.active.request is request:
                continue
            for active in self._scheduler._table.requests.values():
                other = active.request
                is_passed = other.seed < request.seed and other.seed not in self._started
                if is_passed and (other.tenant, other.priority) == (
                    request.tenant,
                    request.priority,
                ):
                    assert any(
                        sequence.state.starved_since is not None
                        or (isinstance(sequence.state, Waiting) and sequence.state.disk_read)
                        or sequence.awaits_mask
                        or (isinstance(sequence.state, Waiting) and sequence.state.num_state_waits)
                        for sequence in active.sequences
                    )

    def _check_saves(self, plan: StepPlan) -> None:
        """Check that states are saved where kernels can save them, each within its chunk."""
        firsts = {one.row: one.first_position for one in plan.chunks if one.num_tokens > 1}
        states = self._scheduler._kv.states
        for save in plan.saves:
            assert states is not None
            distance = save.position - firsts[save.row]
            assert distance > 0
            assert distance % states.grid == 0

    def _blocks_being_saved(self) -> list[int]:
        return [block for _, blocks in self._scheduler._kv.cpu._in_flight for block in blocks]

    def _check_places(self, holders: list[ScheduledSequence]) -> None:
        sequence_table = self._scheduler._table
        places: dict[type[SequenceState], list[ScheduledSequence]] = {
            Waiting: list(sequence_table.waiting),
            Running: list(sequence_table.running),
            Swapped: list(sequence_table.swapped),
            Arriving: list(sequence_table.arriving),
            Quarantined: list(sequence_table.quarantined),
            Held: [s for a in sequence_table.requests.values() for s in a.held],
        }
        for state, sequences in places.items():
            assert len(sequences) == len(set(map(id, sequences)))
            assert {id(s) for s in sequences} == {id(s) for s in holders if type(s.state) is state}
            if state is Waiting:
                for tenant in {s.active.request.tenant for s in sequences}:
                    own = [s for s in sequences if s.active.request.tenant == tenant]
                    assert own == sorted(own, key=lambda s: s.order)
            elif state is not Held:
                assert sequences == sorted(sequences, key=lambda s: s.order)
        for sequence in holders:
            has_row = isinstance(sequence.state, Placed)
            assert has_row == bool(sequence.blocks.ids)
            assert isinstance(sequence.state, Swapped) == bool(_cpu_ids(sequence))
        rows = [s.state.row for s in holders if isinstance(s.state, Placed)]
        rows += sequence_table._free_rows
        assert sorted(rows) == list(range(self._max_num_seqs))
        queued = [a.request for a in sequence_table.requests.values() if a.is_queued]
        assert sequence_table.backlog.num_requests == len(queued)
        assert sequence_table.backlog.num_tokens == sum(len(r.prompt_token_ids) for r in queued)
        for active in sequence_table.requests.values():
            tenant = active.request.tenant
            num_open = sum(a.request.tenant == tenant for a in sequence_table.requests.values())
            assert all(one.share.num_open == num_open for one in active.sequences)

    def _check_cache(self, worker: FakeWorker) -> None:
        kv = self._scheduler._kv
        if not kv.device.is_enabled:
            assert not any(kv.pool._is_kept)
            assert len(kv.device) == 0
            return
        block_of, keys = kv.device._block_of, kv.device._keys
        key_of = {block: key for block, key in enumerate(keys) if key is not None}
        assert {key.digest: block for block, key in key_of.items()} == block_of
        assert set(key_of) == {b for b in range(kv.pool.num_blocks) if kv.pool._is_kept[b]}
        assert set(kv.pool._idle) <= set(key_of)
        self._check_cpu_cache(worker)
        self._check_disk_cache(worker)
        if worker.plans:
            return
        # Keys match the content of their sequence.
        for block, key in key_of.items():
            if block in kv.device.arriving:
                continue
            content = worker.device[block]
            if not any(isinstance(value, BadValue) for value in content):
                assert content == self._expected_content[key.digest]
            else:
                # It may still be bad in the cache, but is not verified.
                assert not kv.device.is_verified(block)

    def _check_cpu_cache(self, worker: FakeWorker) -> None:
        kv = self._scheduler._kv
        cpu_cache = kv.cpu
        if not cpu_cache.is_enabled:
            assert not any(kv.cpu_pool._is_kept)
        assert kv.cpu_pool is cpu_cache.pool
        key_of, saving = cpu_cache._key_of, set(self._blocks_being_saved())
        saving |= {copy.target for copy in _disk_copies(worker, is_read=True)}
        assert {key.digest: block for block, key in key_of.items()} == cpu_cache._block_of
        assert set(key_of) == {b for b in range(kv.cpu_pool.num_blocks) if kv.cpu_pool._is_kept[b]}
        assert set(kv.cpu_pool._idle) <= set(key_of)
        assert cpu_cache._incomplete == saving & set(key_of)
        assert not cpu_cache._copies, "a plan lacks copies"
        assert not kv.device._loads, "a plan lacks copies"
        for block, key in key_of.items():
            if block not in saving:
                assert cpu_cache.find_block(key) == block
                assert worker.cpu[block] == self._expected_content[key.digest]

    def _check_disk_cache(self, worker: FakeWorker) -> None:
        disk_cache = self._scheduler._kv.disk
        if disk_cache is None:
            return
        key_of, pool = disk_cache._key_of, disk_cache.pool
        writing = {copy.target for copy in _disk_copies(worker, is_read=False)}
        assert {key.digest: block for block, key in key_of.items()} == disk_cache._block_of
        assert set(key_of) == {b for b in range(pool.num_blocks) if pool._is_kept[b]}
        assert set(pool._idle) <= set(key_of)
        assert disk_cache._incomplete == writing & set(key_of)
        assert not disk_cache._reads, "a plan lacks reads"
        assert disk_cache.num_reading == len(_disk_copies(worker, is_read=True))
        assert disk_cache._num_writing == len(_disk_copies(worker, is_read=False))
        assert set(disk_cache._step_of) == {c.target for c in _disk_copies(worker, is_read=True)}
        for block, key in key_of.items():
            if block not in writing:
                assert disk_cache.find_block(key) == block
                assert worker.disk[block] == self._expected_content[key.digest]

    def _note_keys(self, sequence: ScheduledSequence) -> None:
        size = self._block_size
        missing = [key for key in sequence.blocks.keys if key.digest not in self._expected_content]
        if not missing:
            return
        chain = fingerprints(sequence.active.request.tenant, sequence.token_ids)
        for index, key in enumerate(sequence.blocks.keys):
            for group in range(len(self._windows)):
                digest = group_key(key, group).digest
                content = [in_group(one, group) for one in chain[index * size : (index + 1) * size]]
                assert self._expected_content.setdefault(digest, content) == content
            for part in range(self._scheduler._kv.groups.num_state_blocks):
                digest = state_key(key, part).digest
                content = [in_state(chain, (index + 1) * size, part)] * size
                assert self._expected_content.setdefault(digest, content) == content

    def _check_stats(self, holders: list[ScheduledSequence]) -> None:
        stats, pool = self._scheduler.stats(), self._scheduler._kv.pool
        states = Counter(type(sequence.state) for sequence in holders)
        assert stats.num_running == states[Running]
        waiting = (Waiting, Held, Quarantined)
        assert stats.num_waiting == sum(states[state] for state in waiting)
        assert stats.num_swapped == states[Swapped] + states[Arriving]
        assert stats.num_free_blocks == len(pool._free) + len(pool._idle)
        assert stats.num_cached_blocks == len(pool._idle)
        assert stats.num_cached_cpu_blocks == len(self._scheduler._kv.cpu_pool._idle)
        for plan in self._plans[self._num_counted :]:
            self._num_saved += sum(copy.source < pool.num_blocks for copy in plan.evictions)
            self._num_moved_out += len(plan.evictions) + len(plan.swap_outs)
            self._num_moved_in += len(plan.swap_ins)
        self._num_counted = len(self._plans)
        assert stats.num_saved_blocks == self._num_saved
        assert stats.num_saved_blocks + stats.num_swapped_out_blocks == self._num_moved_out
        assert stats.num_restored_blocks + stats.num_swapped_in_blocks == self._num_moved_in
        num_restored_tokens = stats.num_restored_blocks * self._block_size
        if self._windows == (None,) and self._scheduler._kv.states is None:
            assert stats.num_cpu_hit_tokens == num_restored_tokens
        elif self._scheduler._kv.states is None:
            assert num_restored_tokens // len(self._windows) <= stats.num_cpu_hit_tokens
        assert stats.num_cpu_hit_tokens <= num_restored_tokens
        assert stats.num_steps == len(self._plans)
        assert stats.num_scheduled_tokens == self._num_planned_tokens


def _cpu_ids(sequence: ScheduledSequence) -> list[int]:
    return sequence.state.cpu_ids if isinstance(sequence.state, Swapped) else []


def _state_ids(sequence: ScheduledSequence) -> list[int]:
    return sequence.state.state_ids if isinstance(sequence.state, Swapped) else []


def _load_ids(sequence: ScheduledSequence) -> list[int]:
    return [] if sequence.blocks.states is None else sequence.blocks.states.load_ids


def _check_pool(pool: BlockPool, *, references: Iterable[int], pins: Iterable[int]) -> None:
    """Check that each block has one state, and as many references as owners."""
    num_references, num_pins = [0] * pool.num_blocks, [0] * pool.num_blocks
    for block in references:
        num_references[block] += 1
    for block in pins:
        num_pins[block] += 1
    assert num_references == list(pool._num_references)
    assert num_pins == pool._num_pins
    uses = list(zip(num_references, num_pins, strict=True))
    free = sorted([*pool._free, *pool._idle])
    assert free == [block for block, use in enumerate(uses) if use == (0, 0)]
    num_in_transit = sum(not held and pinned > 0 for held, pinned in uses)
    assert pool.num_in_transit == num_in_transit
    num_owned = pool.num_blocks - num_references.count(0)
    assert pool.num_free + num_owned + pool.num_in_transit == pool.num_blocks


def _disk_copies(worker: FakeWorker, *, is_read: bool) -> list[BlockCopy]:
    """Return the copies from or to the disk that are under way."""
    jobs = worker.disk_jobs[is_read]
    return [copy for _, begun in jobs for copy, _ in begun]
