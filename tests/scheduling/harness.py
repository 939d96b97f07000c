"""A scheduler with a fake worker, and the invariants of both."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from cluster.scheduling.blocks.block_pool import BlockPool
from cluster.scheduling.event import TokenEvent
from cluster.scheduling.planning.policy import MAX_PREEMPTIONS
from cluster.scheduling.scheduler import MAX_PLANS_IN_FLIGHT, Scheduler
from cluster.scheduling.sequence import Sequence as ScheduledSequence
from cluster.scheduling.sequence import SequenceState
from pagedray.batch import BlockCopy, DiskReport, StepPlan
from pagedray.config import Preemption, SchedulerConfig
from pagedray.request import FinishReason, Request, SamplingParams
from tests.scheduling.fake_worker import (
    EOS,
    BadValue,
    Block,
    FakeWorker,
    fingerprints,
    undisturbed,
)
from tests.scheduling.masks.random_masks import RandomMasks

HASH_KEY = b"a key that tests share"


class Harness:
    """Drives a scheduler with a fake worker and checks both after every operation."""

    def __init__(
        self,
        *,
        block_size: int = 4,
        num_blocks: int = 64,
        num_cpu_blocks: int = 0,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 100,
        max_queued_requests: int = 1000,
        preemption: Preemption = "auto",
        block_copy_s: float = 0.0,
        token_s: float = 0.0,
        enable_prefix_cache: bool = True,
        enable_cpu_prefix_cache: bool = True,
        num_disk_blocks: int = 0,
    ) -> None:
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_queued_requests=max_queued_requests,
            preemption=preemption,
        )
        self.scheduler = Scheduler(
            config=self.config,
            block_size=block_size,
            num_blocks=num_blocks,
            num_cpu_blocks=num_cpu_blocks,
            max_model_len=max_model_len,
            enable_prefix_cache=enable_prefix_cache,
            enable_cpu_prefix_cache=enable_cpu_prefix_cache,
            num_disk_blocks=num_disk_blocks,
            hash_key=HASH_KEY,
        )
        self.tenants: dict[int, str] = {}
        self.bad_lengths: dict[int, int] = {}
        self.bad_positions: dict[int, int] = {}
        self.bad_sequences: set[tuple[int, int]] = set()
        self.known_bad: set[BadValue] = set()
        """What logits came from that the scheduler knows to be bad."""
        self._block_copy_s = block_copy_s
        self._token_s = token_s
        self._num_disk_blocks = num_disk_blocks
        self.worker = self._make_worker(num_blocks, num_cpu_blocks)
        self.requests: dict[str, Request] = {}
        self.sequences: list[ScheduledSequence] = []
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.finished_by_caller: set[tuple[str, int]] = set()
        self.events: list[TokenEvent] = []
        self.plans: list[StepPlan] = []
        self.acknowledged_step = -1
        self.masks = RandomMasks()
        self.num_left_behind = 0
        """Sequences seen that left shared blocks behind when they were swapped out."""
        self.num_late = 0
        """Times that a mask was late."""
        self._masked_step = -1
        """The last step whose masks were made."""
        self._num_planned_tokens = 0
        self._was_restricted = False
        self._started: set[int] = set()
        """Seeds of the requests that have started."""
        self._expected_content: dict[bytes, list[int]] = {}

    def add(
        self,
        prompt: Sequence[int],
        *,
        tenant: str = "",
        weight: float = 1.0,
        priority: int = 0,
        deadline_s: float | None = None,
        bad_length: int | None = None,
        bad_position: int | None = None,
        n: int = 1,
        max_tokens: int = 8,
        min_tokens: int = 0,
        ignore_eos: bool = True,
        stop_token_ids: Sequence[int] = (),
        generated: Sequence[tuple[int, ...] | None] = (),
        seed: int | None = None,
        is_masked: bool = False,
    ) -> str:
        """Add a request and return its id.

        Its logits are not finite at `bad_length`, or its values from `bad_position` on.
        """
        seed = len(self.requests) if seed is None else seed
        request = Request(
            id=f"request-{seed}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(
                n=n,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                ignore_eos=ignore_eos,
                stop_token_ids=tuple(stop_token_ids),
            ),
            seed=seed,
            eos_token_ids=(EOS,),
            tenant=tenant,
            weight=weight,
            priority=priority,
            deadline_s=deadline_s,
            generated_token_ids=tuple(generated),
            grammar=self.masks if is_masked else None,
        )
        self.scheduler.add_request(request)
        self.requests[request.id] = request
        self.tenants[seed] = tenant
        if bad_length is not None:
            self.bad_lengths[seed] = bad_length
        if bad_position is not None:
            self.bad_positions[seed] = bad_position
        active = self.scheduler._table.requests[request.id]
        self.sequences += active.sequences
        self.tokens |= {
            (request.id, index): list(generated[index] or ()) if generated else []
            for index in request.open_indices
        }
        return request.id

    def schedule(self) -> StepPlan | None:
        """Make a plan and send it to the worker."""
        num_in_flight = len(self.worker.plans) + len(self.worker.outputs)
        had_work = self.scheduler.has_work
        plan = self.scheduler.schedule()
        if plan is None:
            is_waiting = (
                num_in_flight
                or self.acknowledged_step < self.worker.executed_step
                or len(self.scheduler._table.barred)
                or any(sequence.waits_for_mask for sequence in self.sequences)
                or any(self.worker.disk_jobs.values())
            )
            assert is_waiting or not had_work, "nothing runs and nothing is waited for"
            if not num_in_flight:
                self._make_masks()
            return None
        assert num_in_flight < MAX_PLANS_IN_FLIGHT
        self._check_plan(plan)
        self.plans.append(plan)
        self._num_planned_tokens += plan.num_tokens
        held_rows = {s.row for s in self.sequences if s.row >= 0}
        self.worker.send(plan, held_rows, set(self.known_bad))
        self.worker.begin_disk_jobs(plan)
        self.check()
        if not num_in_flight:
            self._make_masks()
        return plan

    @property
    def can_execute(self) -> bool:
        """Whether there is a plan that has the masks it needs."""
        if not self.worker.plans:
            return False
        step = self.worker.plans[0].step
        return step <= self._masked_step or not any(
            sequence.active.request.grammar is not None
            for flight in self.scheduler._in_flight
            if flight.plan.step == step
            for sequence in flight.sampled
        )

    def execute(self) -> None:
        """Have the worker run the oldest plan."""
        assert self.can_execute
        self.worker.execute()

    def collect(self) -> list[TokenEvent]:
        """Apply the oldest output to the scheduler."""
        events = self._note(self.scheduler.update(self.worker.outputs.popleft()))
        self.known_bad |= self.worker.bad_outputs.popleft()
        self.check()
        self._make_masks()
        return events

    def end_disk_jobs(self, *, num_failed: int = 0) -> None:
        """Report all reads and writes; the first few of each report fail."""
        for is_read, jobs in self.worker.disk_jobs.items():
            while jobs:
                self.end_disk_job(is_read=is_read, num_failed=num_failed)

    def end_disk_job(self, *, is_read: bool, num_failed: int = 0) -> None:
        """Report the oldest reads or writes, if any, of which the first few fail."""
        if not self.worker.disk_jobs[is_read]:
            return
        step, begun = self.worker.disk_jobs[is_read][0]
        blocks = [copy.source if is_read else copy.target for copy, _ in begun]
        report = DiskReport(step, is_read, blocks[:num_failed], 0.1)
        self.worker.end_disk_job(report)
        self.scheduler.note_disk_report(report)
        self.check()

    def acknowledge(self, step: int | None = None) -> None:
        """Acknowledge `step`, or all steps that were run, on all ranks."""
        step = self.worker.executed_step if step is None else step
        assert self.acknowledged_step <= step <= self.worker.executed_step
        self.worker.finish_swaps(step)
        self.acknowledged_step = step
        self.scheduler.acknowledge(step)
        self.check()

    def abort(self, request_id: str) -> list[TokenEvent]:
        """Abort a request."""
        events = self._note(self.scheduler.abort_request(request_id))
        self.check()
        return events

    def finish(self, request_id: str, index: int) -> None:
        """Finish a sequence from outside."""
        if (request_id, index) not in self.reasons:
            self.finished_by_caller.add((request_id, index))
        self.scheduler.finish_sequence(request_id, index)
        self.check()

    def expire(self, now_s: float) -> list[TokenEvent]:
        """End requests past their deadline."""
        events = self._note(self.scheduler.expire_requests(now_s))
        self.check()
        return events

    def replace_worker(self, damaged: Collection[int] | None = None) -> None:
        """Replace the worker; everything in flight is lost.

        The CPU pool is new, or as it was except for `damaged` blocks.
        """
        cpu_blocks = self.worker.cpu if damaged is not None else None
        for block in damaged or ():
            self.worker.cpu[block] = [None] * self.block_size
        num_blocks = len(self.worker.device), len(self.worker.cpu)
        self.worker = self._make_worker(*num_blocks, cpu_blocks)
        self.acknowledged_step = -1
        self._masked_step = -1
        self.scheduler.reset(damaged)
        self.check()

    def restrict(self, allowed: Collection[str] | None) -> None:
        """Allow only some requests to run, or all."""
        self._was_restricted = True
        self.scheduler.recovery.restrict(lambda name: allowed is None or name in allowed)
        for active in self.scheduler._table.requests.values():
            assert active.is_barred == (allowed is not None and active.request.id not in allowed)
        self.check()

    def step(self) -> list[TokenEvent]:
        """Make, run, collect and acknowledge one plan, without pipelining."""
        self.schedule()
        return self.settle()

    def settle(self) -> list[TokenEvent]:
        """Run, collect and acknowledge everything in flight."""
        events: list[TokenEvent] = []
        while self.worker.plans or self.worker.outputs:
            if self.can_execute:
                self.execute()
            else:
                events += self.collect()
        if self.acknowledged_step < self.worker.executed_step:
            self.acknowledge()
        self.end_disk_jobs()
        return events

    def turn(self) -> None:
        """Run one iteration of the controller's loop: plan ahead, then collect."""
        plan = self.schedule()
        num_in_flight = len(self.worker.plans) + len(self.worker.outputs)
        if num_in_flight and (plan is None or num_in_flight == MAX_PLANS_IN_FLIGHT):
            if not self.worker.outputs:
                self.execute()
            self.collect()
        elif plan is None:
            self.acknowledge()
            self.end_disk_jobs()

    def drain(self) -> None:
        """Run until every request has ended, in a bounded number of rounds, and check the end.

        Masks are in time.
        """
        self.masks.lateness = 0.0
        for num_turns in range(self.max_num_turns):
            if not self.scheduler.has_work:
                break
            self.turn()
            # The ranks report late, and not after every step.
            if num_turns % 3 == 0:
                self.acknowledge()
        assert not self.scheduler.has_work, "the work does not end"
        self.settle()
        self.check_end()

    @property
    def max_num_turns(self) -> int:
        """The maximum number of rounds of all sequences in turn, with preemptions."""
        # A token whose mask may be late takes a round more.
        num_tokens = sum(
            sequence.max_length * (1 if sequence.active.request.grammar is None else 2)
            for sequence in self.sequences
        )
        return 20 + (MAX_PREEMPTIONS + 2) * (num_tokens + 8 * len(self.sequences))

    def check_end(self) -> None:
        """Check that each sequence ended once, with its expected tokens, and left nothing."""
        for key, token_ids in self.tokens.items():
            request = self.requests[key[0]]
            reason = self.reasons.get(key)
            assert (reason is None) == (key in self.finished_by_caller)
            expected, expected_reason = undisturbed(
                request,
                key[1],
                max_model_len=self.max_model_len,
                bad_length=self.bad_lengths.get(request.seed),
            )
            has_read_bad = (request.seed, key[1]) in self.bad_sequences
            if reason in (None, FinishReason.ABORT) or (
                has_read_bad and reason is FinishReason.ERROR
            ):
                assert token_ids == expected[: len(token_ids)]
            else:
                assert token_ids == expected
                assert reason is expected_reason
        kv = self.scheduler._kv
        assert kv.pool.num_free == kv.pool.num_blocks
        assert kv.cpu_pool.num_free == kv.cpu_pool.num_blocks
        assert len(self.scheduler._table._free_rows) == self.max_num_seqs

    def check(self) -> None:
        """Check every invariant of the scheduler's state."""
        kv = self.scheduler._kv
        holders = [s for s in self.sequences if s.state is not SequenceState.FINISHED]
        swaps = list(kv._swaps._copied)
        _check_pool(
            kv.pool,
            references=[b for s in self.sequences for b in (*s.block_ids, *s.reserved_block_ids)],
            pins=[block for swap in swaps for block in swap.block_ids],
        )
        _check_pool(
            kv.cpu_pool,
            references=[block for s in self.sequences for block in s.cpu_block_ids],
            pins=[
                *(block for swap in swaps for block in swap.cpu_block_ids),
                *self._blocks_being_saved(),
                *(copy.target for copy in self._disk_copies(is_read=True)),
                *(copy.source for copy in self._disk_copies(is_read=False)),
            ],
        )
        if kv.disk_cache is not None:
            _check_pool(
                kv.disk_cache.pool,
                references=[],
                pins=[
                    *(copy.source for copy in self._disk_copies(is_read=True)),
                    *(copy.target for copy in self._disk_copies(is_read=False)),
                ],
            )
        self._check_places(holders)
        self._check_cache()
        self._check_stats()
        owners: dict[int, set[str]] = {}
        for sequence in holders:
            assert not sequence.num_left_behind or sequence.state is SequenceState.SWAPPED
            self.num_left_behind += sequence.num_left_behind > 0
            if sequence.state is SequenceState.RUNNING:
                assert sequence.num_computed <= sequence.num_slots
            assert sequence.num_slots == len(sequence.block_ids) * self.block_size
            assert sequence.length <= sequence.max_length
            if sequence.num_computed < sequence.decode_end:
                assert sequence.state is SequenceState.RUNNING
                assert not sequence.is_prefill
                assert not sequence.num_deferred
                assert sequence.decode_end <= sequence.num_slots
                assert sequence.decode_end < sequence.max_length
            assert 0 <= sequence.num_pending <= MAX_PLANS_IN_FLIGHT
            for block in sequence.block_ids:
                owners.setdefault(block, set()).add(sequence.active.request.tenant)
        assert all(len(tenants) == 1 for tenants in owners.values())

    def _blocks_being_saved(self) -> list[int]:
        cpu_cache = self.scheduler._kv.cpu_cache
        if cpu_cache is None:
            return []
        return [block for _, blocks in cpu_cache._in_flight for block in blocks]

    def _disk_copies(self, *, is_read: bool) -> list[BlockCopy]:
        """Return the copies from or to the disk that are under way."""
        jobs = self.worker.disk_jobs[is_read]
        return [copy for _, begun in jobs for copy, _ in begun]

    def _make_masks(self) -> None:
        """Make masks for the plan in flight and for deferred sequences, as the controller does."""
        masked = self.scheduler.masked_step()
        if self.worker.plans:
            self._masked_step = self.worker.plans[-1].step
        if masked is None:
            return
        made = masked.make_masks(1.0)
        assert made.masks is None or made.masks.step == self._masked_step
        self.num_late += len(made.late)
        self.worker.late_rows[masked.step] = {sequence.row for sequence in made.late}
        assert self.scheduler.apply_masks(made) == []
        self.check()

    def _make_worker(
        self, num_blocks: int, num_cpu_blocks: int, cpu_blocks: list[Block] | None = None
    ) -> FakeWorker:
        return FakeWorker(
            block_size=self.block_size,
            num_blocks=num_blocks,
            num_cpu_blocks=num_cpu_blocks,
            cpu_blocks=cpu_blocks,
            num_disk_blocks=self._num_disk_blocks,
            max_num_seqs=self.max_num_seqs,
            tenants=self.tenants,
            bad_lengths=self.bad_lengths,
            bad_positions=self.bad_positions,
            bad_sequences=self.bad_sequences,
            block_copy_s=self._block_copy_s,
            token_s=self._token_s,
        )

    def _check_places(self, holders: list[ScheduledSequence]) -> None:
        sequence_table = self.scheduler._table
        places = {
            SequenceState.WAITING: list(sequence_table.waiting),
            SequenceState.RUNNING: list(sequence_table.running),
            SequenceState.SWAPPED: list(sequence_table.swapped),
            SequenceState.ARRIVING: list(sequence_table.arriving),
            SequenceState.BARRED: list(sequence_table.barred),
            SequenceState.HELD: [s for a in sequence_table.requests.values() for s in a.held],
        }
        for state, sequences in places.items():
            assert len(sequences) == len(set(map(id, sequences)))
            assert {id(s) for s in sequences} == {id(s) for s in holders if s.state is state}
            if state is SequenceState.WAITING:
                for tenant in {s.active.request.tenant for s in sequences}:
                    own = [s for s in sequences if s.active.request.tenant == tenant]
                    assert own == sorted(own, key=lambda s: s.order)
            elif state is not SequenceState.HELD:
                assert sequences == sorted(sequences, key=lambda s: s.order)
        for sequence in holders:
            has_row = sequence.state in (SequenceState.RUNNING, SequenceState.ARRIVING)
            assert has_row == (sequence.row >= 0) == bool(sequence.block_ids)
            assert (sequence.state is SequenceState.SWAPPED) == bool(sequence.cpu_block_ids)
        rows = [s.row for s in holders if s.row >= 0]
        rows += sequence_table._free_rows
        assert sorted(rows) == list(range(self.max_num_seqs))
        queued = [a.request for a in sequence_table.requests.values() if a.is_queued]
        assert sequence_table.backlog.num_requests == len(queued)
        assert sequence_table.backlog.num_tokens == sum(len(r.prompt_token_ids) for r in queued)
        for active in sequence_table.requests.values():
            tenant = active.request.tenant
            num_open = sum(a.request.tenant == tenant for a in sequence_table.requests.values())
            assert active.share.num_open == num_open

    def _check_cache(self) -> None:
        kv = self.scheduler._kv
        if not kv.prefix_cache.is_enabled:
            assert not any(kv.pool._is_kept)
            assert len(kv.prefix_cache) == 0
            return
        block_of, keys = kv.prefix_cache._block_of, kv.prefix_cache._keys
        key_of = {block: key for block, key in enumerate(keys) if key is not None}
        assert {key.digest: block for block, key in key_of.items()} == block_of
        assert set(key_of) == {b for b in range(kv.pool.num_blocks) if kv.pool._is_kept[b]}
        assert set(kv.pool._idle) <= set(key_of)
        for sequence in self.sequences:
            self._note_keys(sequence)
        self._check_cpu_cache()
        self._check_disk_cache()
        if self.worker.plans:
            return
        # Keys match the content of their sequence.
        for block, key in key_of.items():
            if block in kv.restores._arriving:
                continue
            content = self.worker.device[block]
            if not any(isinstance(value, BadValue) for value in content):
                assert content == self._expected_content[key.digest]
            else:
                # It may still be bad in the cache, but is not proven.
                assert not kv.prefix_cache.is_proven(block)

    def _check_cpu_cache(self) -> None:
        kv = self.scheduler._kv
        cpu_cache = kv.cpu_cache
        if cpu_cache is None:
            assert not any(kv.cpu_pool._is_kept)
            return
        assert kv.cpu_pool is cpu_cache.pool
        key_of, saving = cpu_cache._key_of, set(self._blocks_being_saved())
        saving |= {copy.target for copy in self._disk_copies(is_read=True)}
        assert {key.digest: block for block, key in key_of.items()} == cpu_cache._block_of
        assert set(key_of) == {b for b in range(kv.cpu_pool.num_blocks) if kv.cpu_pool._is_kept[b]}
        assert set(kv.cpu_pool._idle) <= set(key_of)
        assert cpu_cache._incomplete == saving & set(key_of)
        assert not cpu_cache._copies, "a plan lacks copies"
        assert not kv.restores._copies, "a plan lacks copies"
        for block, key in key_of.items():
            if block not in saving:
                assert cpu_cache.find_block(key) == block
                assert self.worker.cpu[block] == self._expected_content[key.digest]

    def _check_disk_cache(self) -> None:
        disk_cache = self.scheduler._kv.disk_cache
        if disk_cache is None:
            return
        key_of, pool = disk_cache._key_of, disk_cache.pool
        writing = {copy.target for copy in self._disk_copies(is_read=False)}
        assert {key.digest: block for block, key in key_of.items()} == disk_cache._block_of
        assert set(key_of) == {b for b in range(pool.num_blocks) if pool._is_kept[b]}
        assert set(pool._idle) <= set(key_of)
        assert disk_cache._incomplete == writing & set(key_of)
        assert not disk_cache._reads, "a plan lacks reads"
        assert disk_cache.num_reading == len(self._disk_copies(is_read=True))
        assert disk_cache._num_writing == len(self._disk_copies(is_read=False))
        assert set(disk_cache._step_of) == {c.target for c in self._disk_copies(is_read=True)}
        for block, key in key_of.items():
            if block not in writing:
                assert disk_cache.find_block(key) == block
                assert self.worker.disk[block] == self._expected_content[key.digest]

    def _note_keys(self, sequence: ScheduledSequence) -> None:
        size = self.block_size
        missing = [key for key in sequence.keys if key.digest not in self._expected_content]
        if not missing:
            return
        chain = fingerprints(sequence.active.request.tenant, sequence.token_ids)
        for index, key in enumerate(sequence.keys):
            content = chain[index * size : (index + 1) * size]
            assert self._expected_content.setdefault(key.digest, content) == content

    def _check_stats(self) -> None:
        stats, pool = self.scheduler.stats(), self.scheduler._kv.pool
        states = Counter(sequence.state for sequence in self.sequences)
        assert stats.num_running == states[SequenceState.RUNNING]
        waiting = (SequenceState.WAITING, SequenceState.HELD, SequenceState.BARRED)
        assert stats.num_waiting == sum(states[state] for state in waiting)
        assert stats.num_swapped == states[SequenceState.SWAPPED] + states[SequenceState.ARRIVING]
        assert stats.num_free_blocks == len(pool._free) + len(pool._idle)
        assert stats.num_cached_blocks == len(pool._idle)
        assert stats.num_cached_cpu_blocks == len(self.scheduler._kv.cpu_pool._idle)
        assert stats.num_saved_blocks == sum(len(plan.evictions) for plan in self.plans)
        assert stats.num_restored_blocks + stats.num_swapped_in_blocks == sum(
            len(plan.swap_ins) for plan in self.plans
        )
        assert stats.num_cpu_hit_tokens == stats.num_restored_blocks * self.block_size
        assert stats.num_steps == len(self.plans)
        assert stats.num_scheduled_tokens == self._num_planned_tokens

    def _check_plan(self, plan: StepPlan) -> None:
        sizes = [sequence.num_tokens for sequence in plan.sequences]
        assert sum(sizes) <= self.config.max_num_batched_tokens
        assert len(sizes) <= self.max_num_seqs
        assert len({sequence.row for sequence in plan.sequences}) == len(sizes)
        assert [size > 1 for size in sizes] == sorted((size > 1 for size in sizes), reverse=True)
        assert sizes or plan.starts or plan.swap_outs or plan.disk_reads
        # Requests of equal priority and tenant start in order of arrival, but for those that have
        # found too few blocks.
        by_seed = {request.seed: request for request in self.requests.values()}
        self._started |= {start.seed for start in plan.starts}
        if self._was_restricted:
            return
        for start in plan.starts:
            request = by_seed[start.seed]
            for active in self.scheduler._table.requests.values():
                other = active.request
                is_passed = other.seed < request.seed and other.seed not in self._started
                if is_passed and (other.tenant, other.priority) == (
                    request.tenant,
                    request.priority,
                ):
                    assert any(
                        sequence.refusal_number >= 0 or sequence.disk_step is not None
                        for sequence in active.sequences
                    )

    def _note(self, events: list[TokenEvent]) -> list[TokenEvent]:
        for event in events:
            key = (event.request_id, event.index)
            assert key not in self.reasons, "an event follows the last"
            assert key not in self.finished_by_caller
            self.tokens[key] += event.token_ids
            assert event.num_prompt_tokens == len(self.requests[key[0]].prompt_token_ids)
            if event.finish_reason is not None:
                self.reasons[key] = event.finish_reason
        self.events += events
        return events


def _check_pool(pool: BlockPool, *, references: Iterable[int], pins: Iterable[int]) -> None:
    """Check that each block has one state, and as many references as owners."""
    num_references, num_pins = Counter(references), Counter(pins)
    blocks = range(pool.num_blocks)
    assert [num_references[block] for block in blocks] == pool._num_references
    assert [num_pins[block] for block in blocks] == pool._num_pins
    free = [*pool._free, *pool._idle]
    assert len(free) == len(set(free))
    used = {block for block in blocks if num_references[block] or num_pins[block]}
    assert set(free) == set(blocks) - used
    in_transit = {block for block in blocks if num_pins[block] and not num_references[block]}
    assert pool.num_in_transit == len(in_transit)
    assert pool.num_owned == len({block for block in blocks if num_references[block]})
    assert pool.num_free + pool.num_owned + pool.num_in_transit == pool.num_blocks
