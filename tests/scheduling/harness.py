"""A scheduler with a fake worker, both checked after every operation."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from cluster.scheduling.kv_manager import KvOptions
from cluster.scheduling.policy import MAX_PREEMPTIONS
from cluster.scheduling.scheduler import MAX_PLANS_IN_FLIGHT, Scheduler
from cluster.scheduling.sequence import Placed
from cluster.scheduling.speculation import Speculator
from pagedray.batch import DiskReport, StepPlan
from pagedray.config import Preemption, SchedulerConfig, SpeculationConfig
from pagedray.request import AskedMasks, FinishReason, Request
from pagedray.sampling_params import SamplingParams
from tests.scheduling.drafting import FreeDrafts, GuessingDrafter, RandomTimes
from tests.scheduling.fake_worker import EOS, BadValue, Block, FakeWorker, SeedRecords, undisturbed
from tests.scheduling.invariants import Invariants

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from cluster.scheduling.event import TokenEvent
    from cluster.scheduling.sequence import Sequence as ScheduledSequence

__all__ = ["RandomMasks"]

HASH_KEY = b"a key that tests share"
_COSTLY = 0.2
"""How many of the masks are."""
_FREE = 0.1
"""How many of the masks are the last ones of their sequences."""
_FORCED = 0.3
"""How many of the masks come with forced tokens."""


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
        windows: tuple[int | None, ...] = (None,),
        state_blocks: int = 0,
        state_grid: int = 4,
        num_drafts: int = 0,
        right: float = 0.7,
        has_head: bool = False,
        has_gaps: bool = False,
        speculator: Speculator | None = None,
    ) -> None:
        """Sequences have up to `num_drafts` drafts, each right with probability `right`.

        A draft head of the worker guesses them if it `has_head`. If it `has_gaps`, some plans with
        other drafts are overlapped, too. They have the drafts of a `speculator` if there is one.
        """
        self._right = right
        self.windows = windows
        self.state_blocks = state_blocks
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_queued_requests=max_queued_requests,
            preemption=preemption,
        )
        if has_head:
            config = SpeculationConfig(num_speculative_tokens=num_drafts, method="mtp")
            speculator = Speculator(config)
            speculator.times = RandomTimes(num_drafts)
        elif num_drafts:
            config = SpeculationConfig(num_speculative_tokens=num_drafts)
            speculator = Speculator(config, GuessingDrafter(0, right=right))
            speculator.times = RandomTimes(num_drafts) if has_gaps else FreeDrafts()
        self.scheduler = Scheduler(
            config=self.config,
            kv=KvOptions(
                block_size=block_size,
                num_blocks=num_blocks,
                num_cpu_blocks=num_cpu_blocks,
                enable_prefix_cache=enable_prefix_cache,
                enable_cpu_prefix_cache=enable_cpu_prefix_cache,
                num_disk_blocks=num_disk_blocks,
                hash_key=HASH_KEY,
                windows=windows,
                state_blocks=state_blocks,
                state_grid=state_grid,
            ),
            max_model_len=max_model_len,
            speculator=speculator,
        )
        self._seeds = SeedRecords()
        self.known_bad: set[BadValue] = set()
        """What logits came from that the scheduler knows to be bad."""
        self._block_copy_s = block_copy_s
        self._token_s = token_s
        self._num_disk_blocks = num_disk_blocks
        self.worker = self._make_worker(num_blocks, num_cpu_blocks)
        self.requests: dict[str, Request] = {}
        self.sequences: list[ScheduledSequence] = []
        self.results = Results(self.requests, max_model_len=max_model_len, seeds=self._seeds)
        self.plans: list[StepPlan] = []
        self.acknowledged_step = -1
        self.masks = RandomMasks()
        self.num_late = 0
        """Times that a mask was late."""
        self.num_cut = 0
        """Chains without masks behind some of their drafts."""
        self._masked_step = -1
        """The last step whose masks were made."""
        self._was_restricted = False
        self._invariants = Invariants(
            self.scheduler,
            config=self.config,
            block_size=block_size,
            windows=windows,
            requests=self.requests,
            sequences=self.sequences,
            plans=self.plans,
        )

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
        disable_spec_decode: bool = False,
        anchors: Sequence[int] = (),
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
                disable_spec_decode=disable_spec_decode,
                # Masks of some begin later.
                thinking_token_budget=seed % 3 if is_masked else None,
            ),
            seed=seed,
            eos_token_ids=(EOS,),
            tenant=tenant,
            weight=weight,
            priority=priority,
            deadline_s=deadline_s,
            generated_token_ids=tuple(generated),
            anchors=tuple(anchors),
            grammar=self.masks if is_masked else None,
        )
        self.scheduler.add_request(request)
        self.requests[request.id] = request
        self._seeds.tenants[seed] = tenant
        if bad_length is not None:
            self._seeds.bad_lengths[seed] = bad_length
        if bad_position is not None:
            self._seeds.bad_positions[seed] = bad_position
        active = self.scheduler._table.requests[request.id]
        self.sequences += active.sequences
        self.results.expect(request)
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
                or len(self.scheduler._table.quarantined)
                or any(sequence.waits_for_mask for sequence in self.sequences)
                or any(self.worker.disk_jobs.values())
            )
            assert is_waiting or not had_work, "nothing runs and nothing is waited for"
            if not num_in_flight:
                self._make_masks()
            return None
        assert num_in_flight < MAX_PLANS_IN_FLIGHT
        self._invariants.check_plan(plan, is_restricted=self._was_restricted)
        self.plans.append(plan)
        held_rows = {s.state.row for s in self.sequences if isinstance(s.state, Placed)}
        self.worker.send(plan, held_rows, set(self.known_bad))
        self.worker.begin_disk_jobs(plan)
        self.check()
        if not num_in_flight:
            self._make_masks()
        return plan

    def plan(self) -> StepPlan:
        """Make a plan, which there must be, and send it to the worker."""
        plan = self.schedule()
        assert plan is not None
        return plan

    @property
    def can_execute(self) -> bool:
        """Whether there is a plan that has the masks it needs."""
        if not self.worker.plans:
            return False
        step = self.worker.plans[0].step
        return step <= self._masked_step or not any(
            sequence.active.request.grammar is not None
            for in_flight in self.scheduler._in_flight
            if in_flight.plan.step == step
            for sequence in (*in_flight.sampled, *(one.sequence for one in in_flight.chains))
        )

    def execute(self) -> None:
        """Have the worker run the oldest plan."""
        assert self.can_execute
        self.worker.execute()

    def collect(self) -> list[TokenEvent]:
        """Apply the oldest output to the scheduler."""
        events = self.scheduler.update(self.worker.outputs.popleft())
        self.results.note(events)
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
        events = self.scheduler.abort_request(request_id)
        self.results.note(events)
        self.check()
        return events

    def finish(self, request_id: str, index: int) -> None:
        """Finish a sequence from outside."""
        self.results.note_finish(request_id, index)
        self.scheduler.finish_sequence(request_id, index)
        self.check()

    def expire(self, now_s: float) -> list[TokenEvent]:
        """End requests past their deadline."""
        events = self.scheduler.expire_requests(now_s)
        self.results.note(events)
        self.check()
        return events

    def replace_worker(self, *, keeps_cpu_pool: bool = False) -> None:
        """Replace the worker; everything in flight is lost. The CPU pool is new, or as it was."""
        cpu_blocks = self.worker.cpu if keeps_cpu_pool else None
        num_blocks = self.worker.num_blocks, len(self.worker.cpu)
        self.worker = self._make_worker(*num_blocks, cpu_blocks)
        self.acknowledged_step = -1
        self._masked_step = -1
        self.scheduler.reset(keeps_cpu_pool=keeps_cpu_pool)
        self.check()

    def restrict(self, allowed: Collection[str] | None) -> None:
        """Allow only some requests to run, or all."""
        self._was_restricted = True
        self.scheduler.restrict_requests(lambda name: allowed is None or name in allowed)
        for active in self.scheduler._table.requests.values():
            assert active.is_quarantined == (
                allowed is not None and active.request.id not in allowed
            )
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

    def check(self) -> None:
        """Check every invariant of the scheduler's state."""
        self._invariants.check(self.worker)

    @property
    def num_unswapped(self) -> int:
        """Sequences seen that left shared blocks behind when they were swapped out."""
        return self._invariants.num_unswapped

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
        self.results.check_complete()
        kv = self.scheduler._kv
        assert kv.pool.num_free == kv.pool.num_blocks
        assert kv.cpu_pool.num_free == kv.cpu_pool.num_blocks
        assert len(self.scheduler._table._free_rows) == self.max_num_seqs

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
        # Others have lost their rows meanwhile, and their tokens are discarded.
        num_sampled = dict.fromkeys(made.late, 0)
        num_sampled |= {sequence: number + 1 for sequence, number in made.cut.items()}
        self.num_cut += len(made.cut)
        self.worker.num_sampled[masked.step] = {
            sequence.state.row: number
            for sequence, number in num_sampled.items()
            if isinstance(sequence.state, Placed)
        }
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
            seeds=self._seeds,
            block_copy_s=self._block_copy_s,
            token_s=self._token_s,
            windows=self.windows,
            state_blocks=self.state_blocks,
            right=self._right,
            max_model_len=self.max_model_len,
        )


class _Matcher:
    error = ""
    is_costly = False
    is_free = False
    num_tokens = -1
    """Tokens before the mask that was made last."""
    num_drafts = 0
    """Drafts behind which masks were made with that mask."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.forced_ids: list[int] = []


class RandomMasks:
    """Makes each mask at one of the calls that ask for it; forces some tokens, right or wrong."""

    num_mask_bytes = 1

    def __init__(self, seed: int = 0) -> None:
        self.lateness = 0.5
        """How many of the masks are not made at a call."""
        self._random = random.Random(seed)
        self._drafter = GuessingDrafter(seed, right=0.9)

    def matcher(self, request: Request) -> _Matcher:
        return _Matcher(request)

    def masks(
        self,
        asked: Sequence[AskedMasks],
        *,
        num_awaited: int,
        wait_s: float,
    ) -> list[bytes | FinishReason | None]:
        return [self._masks(one) for one in asked]

    def _masks(self, asked: AskedMasks) -> bytes | None:
        matcher: _Matcher = asked.matcher
        num_tokens, num_drafts = len(asked.token_ids), len(asked.draft_ids)
        if matcher.num_tokens != num_tokens:
            if self._random.random() < self.lateness:
                return None
            matcher.num_tokens = num_tokens
            matcher.is_costly = self._random.random() < _COSTLY
            matcher.is_free = self._random.random() < _FREE
            if num_drafts and self._random.random() < self.lateness:
                num_drafts = self._random.randrange(num_drafts)
            matcher.num_drafts = num_drafts
            matcher.forced_ids = []
            if num_drafts == len(asked.draft_ids) and self._random.random() < _FORCED:
                # They are those of the first sequence of the request.
                known_ids = [*asked.token_ids, *asked.draft_ids]
                number = self._random.randint(0, asked.num_forced)
                matcher.forced_ids = self._drafter.guesses(
                    matcher.request, known_ids, number, index=0, rng=self._random
                )
        # After a restart of the ranks, another plan may ask for fewer masks.
        return b"\xff" * (1 + min(matcher.num_drafts, num_drafts))


class Results:
    """The events of all requests, checked as they arrive."""

    def __init__(
        self, requests: Mapping[str, Request], *, max_model_len: int, seeds: SeedRecords
    ) -> None:
        self._requests = requests
        self._max_model_len = max_model_len
        self._seeds = seeds
        self.events: list[TokenEvent] = []
        self.tokens: dict[tuple[str, int], list[int]] = {}
        """What sequences generated, by request and index."""
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        """Why sequences ended, unless the caller finished them."""
        self._finished_by_caller: set[tuple[str, int]] = set()

    def expect(self, request: Request) -> None:
        """Expect events of the open sequences of a request, which may have tokens already."""
        generated = request.generated_token_ids
        for index in request.open_indices:
            known = generated[index] if generated else None
            self.tokens[request.id, index] = list(known or ())

    def note(self, events: Iterable[TokenEvent]) -> None:
        """Add events. None follows the end of its sequence."""
        for event in events:
            key = (event.request_id, event.index)
            assert key not in self.reasons, "an event follows the last"
            assert key not in self._finished_by_caller
            self.tokens[key] += event.token_ids
            assert event.num_prompt_tokens == len(self._requests[key[0]].prompt_token_ids)
            if event.finish_reason is not None:
                self.reasons[key] = event.finish_reason
            self.events.append(event)

    def note_finish(self, request_id: str, index: int) -> None:
        """Expect no more events of a sequence, which the caller finishes."""
        if (request_id, index) not in self.reasons:
            self._finished_by_caller.add((request_id, index))

    def check_complete(self) -> None:
        """Check that each sequence ended once, with its expected tokens."""
        for (request_id, index), token_ids in self.tokens.items():
            request = self._requests[request_id]
            reason = self.reasons.get((request_id, index))
            assert (reason is None) == ((request_id, index) in self._finished_by_caller)
            expected, expected_reason = undisturbed(
                request,
                index,
                max_model_len=self._max_model_len,
                bad_length=self._seeds.bad_lengths.get(request.seed),
            )
            has_read_bad = (request.seed, index) in self._seeds.bad_sequences
            if reason in (None, FinishReason.ABORT) or (
                has_read_bad and reason is FinishReason.ERROR
            ):
                assert token_ids == expected[: len(token_ids)]
            else:
                assert token_ids == expected
                assert reason is expected_reason
