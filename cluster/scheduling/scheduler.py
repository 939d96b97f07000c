"""Queues requests, makes plans, and turns sampled tokens into events.

The scheduler makes the plan of step k + 1 before it has seen the tokens of step k. The
number of sampled tokens is known in advance, so no sequence exceeds its limit; the tokens
are not, so a stop token is found one step late and the token of that step is discarded.
The exception are steps with drafts, of which a sequence may get any number of tokens: until
their tokens are known, only overlapped plans are made, which continue the same sequences
(`Planner.continue_plan`).

It has no clock and no thread: times are arguments, and callers hold a lock.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from cluster.scheduling.costs import CostMeter, StepPace, StepTimes, SwapCosts
from cluster.scheduling.fair_queue import Backlog
from cluster.scheduling.fault_recovery import Blame, BlamedError, FaultRecovery
from cluster.scheduling.kv_manager import KvManager, KvOptions
from cluster.scheduling.masked_step import MadeMasks, MaskedRow, MaskedStep
from cluster.scheduling.output_reader import InFlightStep, OutputReader, PromptLogprobsBuffer
from cluster.scheduling.planner import Planner
from cluster.scheduling.sequence import FINISHED, ActiveRequest, Sequence
from cluster.scheduling.sequence_table import SequenceTable
from cluster.scheduling.stats import SchedulerStats, SpeculationStats, cache_counts
from pagedray.batch import TOKEN_ID_BYTES
from pagedray.errors import CapacityError, InvalidRequestError, WorkerError
from pagedray.request import FinishReason, Request
from pagedray.text import pluralize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from cluster.scheduling.device_tier import PromptKeys
    from cluster.scheduling.event import TokenEvent
    from cluster.scheduling.plan_builder import PlanBuilder
    from cluster.scheduling.speculation import Speculator
    from pagedray.batch import DiskReport, StepOutput, StepPlan
    from pagedray.config import SchedulerConfig

__all__ = ["MAX_PLANS_IN_FLIGHT", "Deadlines", "PreparedPrompt", "Scheduler", "SchedulerStats"]

MAX_PLANS_IN_FLIGHT = 2

_MAX_TOKEN_ID = 2**31 - 1
_FEW = 64
"""Entries of ended requests that are kept without a search for them."""


class PreparedPrompt(NamedTuple):
    """The results of the slow part of queueing a prompt."""

    token_ids: array[int]
    """The tokens of the prompt, uint32."""
    keys: PromptKeys | None
    """None if they are quickly computed when it starts."""


class Scheduler:
    """Decides which sequences run on which blocks, and when they end."""

    max_plans_in_flight = MAX_PLANS_IN_FLIGHT

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        kv: KvOptions,
        max_model_len: int,
        speculator: Speculator | None = None,
    ) -> None:
        """Without a speculator, sequences have no drafts."""
        self._max_model_len = max_model_len
        step_times = StepTimes()
        self._swap_costs = SwapCosts(step_times)
        self._backlog = Backlog(
            max_requests=config.max_queued_requests, max_tokens=config.max_queued_tokens
        )
        limits = config.limits()
        self._kv = KvManager(
            kv,
            costs=None if config.preemption == "swap" else self._swap_costs,
            limits=limits,
        )
        self._max_num_tokens = limits.max_num_batched_tokens
        self._table = SequenceTable(self._kv, num_rows=limits.max_num_seqs, backlog=self._backlog)
        self._admission = Admission(self._kv, self._backlog, max_model_len=max_model_len)
        self._recovery = FaultRecovery(self._table)
        pace = None
        if config.itl_target_ms is not None:
            pace = StepPace(config.itl_target_ms / 1e3, step_times)
        may_copy = config.preemption == "auto" or self._kv.cpu.is_enabled
        has_choice = kv.num_cpu_blocks > 0 and config.preemption != "swap" and may_copy
        self._cost_meter = None
        if has_choice or pace is not None:
            self._cost_meter = CostMeter(step_times, self._swap_costs, pace)
        self._speculator = speculator
        self._planner = Planner(
            self._kv,
            self._table,
            config=config,
            swap_costs=self._swap_costs,
            max_model_len=max_model_len,
            pace=pace,
            speculator=speculator,
        )
        self._in_flight: deque[InFlightStep] = deque()
        self._deadlines = Deadlines(self._table.requests)
        self._step = 0
        self._acknowledged_step = -1
        self._num_arrivals = 0
        self._prompt_logprobs = PromptLogprobsBuffer()
        self._outputs = OutputReader(
            self._kv,
            self._table,
            recovery=self._recovery,
            prompt_logprobs=self._prompt_logprobs,
            speculator=self._speculator,
        )
        self._has_structures = False
        self._deferred: list[Sequence] = []
        """Sequences that are planned again only once their masks are made."""
        self._num_steps = 0
        self._num_scheduled_tokens = 0
        self._num_swapped_out_blocks = 0
        self._num_swapped_in_blocks = 0

    @property
    def has_disk(self) -> bool:
        """Whether plans may have reads and writes of files."""
        return self._kv.disk is not None

    @property
    def has_structures(self) -> bool:
        """Whether any request so far had a grammar."""
        return self._has_structures

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended or a plan is in flight."""
        return bool(self._table.requests or self._in_flight)

    @property
    def num_nonfinite_sequences(self) -> int:
        """Sequences that ended because their logits were not finite."""
        return self._outputs.num_nonfinite_sequences

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._table.requests)

    @property
    def num_running(self) -> int:
        """Sequences that have a row and all their blocks."""
        return len(self._table.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that have neither row nor blocks, including quarantined sequences."""
        return len(self._table.waiting) + self._table.num_held + len(self._table.quarantined)

    @property
    def num_swapped(self) -> int:
        """Sequences with blocks in the CPU pool, or on their way there or back."""
        return len(self._table.swapped) + len(self._table.arriving)

    def prepare_prompt(self, request: Request) -> PreparedPrompt:
        """Do the part of `add_request` that takes long. May be called from any thread.

        Raises InvalidRequestError.
        """
        token_ids = self._admission.read_prompt(request)
        return PreparedPrompt(token_ids, self._kv.hash_prompt(request, token_ids))

    def add_request(self, request: Request, prepared: PreparedPrompt | None = None) -> None:
        """Queue a request. Raises CapacityError, InvalidRequestError or OverloadedError."""
        if request.id in self._table.requests:
            raise InvalidRequestError(f"A request with id {request.id!r} is already running.")
        prompt, keys = prepared or self.prepare_prompt(request)
        self._admission.check_request(request)
        active = ActiveRequest(
            request, prompt=prompt, arrival=self._num_arrivals, max_model_len=self._max_model_len
        )
        self._num_arrivals += 1
        if keys is not None:
            active.sequences[0].blocks.keys, active.sequences[0].blocks.keys_revision = keys
        self._recovery.quarantine_new_request(active)
        self._has_structures = self._has_structures or request.grammar is not None
        if self._kv.states is not None:
            for sequence in active.sequences:
                if sequence.masks is not None:
                    sequence.masks.defer_all()
        if self._speculator is not None:
            for sequence in active.sequences:
                self._speculator.open_sequence(sequence)
        self._table.add_request(active)
        self._prompt_logprobs.add_request(active)
        self._deadlines.add_request(request)

    def check_room(self, tenant: str, num_tokens: int) -> None:
        """Raise OverloadedError if the queue has no room for this many more prompt tokens.

        May be called from any thread.
        """
        self._backlog.check_room(tenant, num_tokens)

    def abort_request(self, request_id: str) -> list[TokenEvent]:
        """End the unfinished sequences of a request, if any."""
        return [
            self._outputs.end_sequence(sequence, FinishReason.ABORT)
            for sequence in self._table.unfinished(request_id)
        ]

    def finish_sequence(self, request_id: str, index: int) -> bool:
        """End a sequence without an event; return whether it was unfinished."""
        for sequence in self._table.unfinished(request_id):
            if sequence.index == index:
                # Its stop string may be found while it is computed again.
                if sequence.has_sampled:
                    self._kv.prefixes.mark_verified(sequence)
                if self._speculator is not None:
                    self._speculator.close_sequence(sequence)
                self._table.remove_sequence(sequence)
                self._prompt_logprobs.forget_sequence(sequence)
                return True
        return False

    def is_open(self, request_id: str) -> bool:
        """Return whether a request has not ended."""
        return request_id in self._table.requests

    def request_of(self, request_id: str) -> Request:
        """Return the request with an id, which must be open."""
        return self._table.requests[request_id].request

    @property
    def num_epoch_steps(self) -> int:
        """The number of plans since the ranks started."""
        return self._step

    def in_flight_lengths(self) -> dict[str, dict[int, int]]:
        """Return the known tokens of the sequences in the plans in flight, by request and index.

        Some may have ended.
        """
        lengths: dict[str, dict[int, int]] = {}
        for in_flight in self._in_flight:
            for sequence in (*in_flight.prefilled, *in_flight.sampled_sequences):
                known = lengths.setdefault(sequence.request_id, {})
                known[sequence.index] = len(sequence.token_ids)
        return lengths

    def lengths_of(self, request_ids: Iterable[str]) -> dict[str, dict[int, int]]:
        """Return the known tokens of unfinished sequences, by request and index."""
        return {
            request_id: {
                sequence.index: len(sequence.token_ids)
                for sequence in self._table.unfinished(request_id)
            }
            for request_id in request_ids
        }

    def expire_requests(self, now_s: float) -> list[TokenEvent]:
        """End requests past their deadline; to be called regularly."""
        self._backlog.tick(now_s)
        events: list[TokenEvent] = []
        for request_id in self._deadlines.take_due(now_s):
            events += self.abort_request(request_id)
        return events

    def schedule(self, now_s: float = 0.0) -> StepPlan | None:
        """Return the next plan, or None if nothing can run before an output or acknowledgement.

        Requests that it starts have started at `now_s`.
        """
        if len(self._in_flight) == self.max_plans_in_flight or self._recovery.needs_repair:
            return None
        if self._speculator is not None and self._waits_for_tokens(self._speculator):
            builder = self._planner.continue_plan(self._step, self._in_flight[-1])
        else:
            builder = self._plan_step()
        if builder.deferred:
            self._deferred += [one for one in builder.deferred if one not in self._deferred]
        if builder.is_empty:
            return None
        plan = builder.build_plan()
        buffer = self._prompt_logprobs
        logprob_rows = buffer.prompt_logprob_rows(builder.prefilled) if buffer.requests else {}
        masked = _masked_rows(builder) if self._has_structures else []
        self._in_flight.append(
            InFlightStep(
                plan,
                builder.sampled,
                builder.prefilled,
                [],
                logprob_rows,
                masked,
                builder.chains,
                is_alone=not self._in_flight,
            )
        )
        self._step += 1
        self._num_steps += 1
        self._num_scheduled_tokens += plan.num_tokens
        self._num_swapped_out_blocks += len(builder.swap_outs)
        self._num_swapped_in_blocks += len(builder.swap_ins)
        for active in self._table.take_started():
            active.started_s = now_s
        return plan

    def update(self, output: StepOutput) -> list[TokenEvent]:
        """Apply the output of the oldest plan in flight and return its events."""
        self._check_output(output)
        in_flight = self._in_flight.popleft()
        if self._cost_meter is not None:
            self._cost_meter.note_output(in_flight.plan, output)
        if self._speculator is not None and output.forward_s:
            self._speculator.note_step(in_flight.plan, output, is_alone=in_flight.is_alone)
        return self._outputs.read_output(in_flight, output)

    def masked_step(self) -> MaskedStep | None:
        """Return the sequences to make masks for: of the plan in flight, and others that wait.

        There must be no other plan in flight, since masks depend on the tokens of all earlier
        steps. Needs no lock on the thread that makes plans and applies outputs.
        """
        step, rows = -1, []
        if self._in_flight:
            (in_flight,) = self._in_flight
            step = in_flight.plan.step
            rows = in_flight.masked
        if self._deferred:
            self._deferred = [one for one in self._deferred if one.is_deferred]
        waiting = [one for one in self._deferred if one.waits_for_mask]
        return MaskedStep(step, rows, waiting) if rows or waiting else None

    def apply_masks(self, made: MadeMasks) -> list[TokenEvent]:
        """Take back the plans of sequences with late masks, and end sequences without a mask."""
        if made.cut:
            self._in_flight[0].cut_chains(made.cut)
        for sequence in made.late:
            self._in_flight[0].note_late(sequence)
            if sequence.state is FINISHED:
                continue
            if sequence.is_prefill:
                # It was quarantined meanwhile and has no blocks.
                sequence.prefill_end -= 1
            else:
                self._kv.prefixes.take_back(sequence)
        self._deferred += [one for one in made.deferred if one not in self._deferred]
        return [
            self._outputs.end_sequence(sequence, reason, _error_of_structure(sequence, reason))
            for sequence, reason in made.ends
            if sequence.state is not FINISHED
        ]

    def acknowledge(self, step: int) -> None:
        """Record that every rank has finished all steps up to `step`, copies included."""
        assert step < self._step
        self._acknowledged_step = max(step, self._acknowledged_step)
        self._kv.acknowledge(step)
        for sequence in self._table.run_arrived(step):
            with Blame(sequence):
                self._kv.prefixes.register_blocks(sequence)

    def note_disk_report(self, report: DiskReport) -> None:
        """Take note of blocks that every rank has read from its file or written to it."""
        disk = self._kv.disk
        assert disk is not None
        num_blocks = disk.note_report(report)
        if report.is_read and not report.failed:
            self._swap_costs.note_reads(num_blocks, report.seconds)

    def restrict_requests(self, may_run: Callable[[str], bool]) -> None:
        """Run only the requests with ids that satisfy `may_run`, until the next call.

        Others lose their rows and blocks; their tokens in flight still arrive.
        """
        self._recovery.restrict(may_run)

    def note_fault(self, fault: BlamedError) -> None:
        """Note an error of `schedule` or `acknowledge`; no plan is made before the repair."""
        self._recovery.note_fault(fault.sequence, fault.__cause__)

    def repair(self) -> list[TokenEvent]:
        """End the requests at fault, and recompute all others, once no step is in flight."""
        if not self._recovery.needs_repair:
            return []
        if self._in_flight or self._acknowledged_step < self._step - 1:
            return []
        return [
            self._outputs.end_sequence(sequence, FinishReason.ERROR)
            for sequence in self._recovery.repair()
        ]

    def reset(self, *, keeps_cpu_pool: bool = False) -> None:
        """Begin an epoch with new ranks: steps count from 0, the blocks of the device are empty.

        Every sequence is recomputed from its known tokens; tokens in flight are sampled again. With
        `keeps_cpu_pool`, every rank has its earlier CPU pool, and complete blocks are still found.
        """
        # If the last ranks died before they ended a step, their blocks may be the cause.
        keeps_cpu_pool = keeps_cpu_pool and self._acknowledged_step >= 0
        self._in_flight.clear()
        self._step = 0
        self._acknowledged_step = -1
        self._table.reset_sequences(keeps_cpu_pool=keeps_cpu_pool)

    def stats(self) -> SchedulerStats:
        """Return a snapshot of the gauges and counters."""
        return SchedulerStats(
            max_num_seqs=self._table.num_rows,
            max_num_batched_tokens=self._max_num_tokens,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_swapped=self.num_swapped,
            num_queued_requests=self._backlog.num_requests,
            num_queued_tokens=self._backlog.num_tokens,
            num_swap_preemptions=self._planner.num_swap_preemptions,
            num_recompute_preemptions=self._planner.num_recompute_preemptions,
            num_swapped_out_blocks=self._num_swapped_out_blocks
            + (0 if self._kv.states is None else self._kv.states.num_swapped_out_blocks),
            num_swapped_in_blocks=self._num_swapped_in_blocks,
            num_scheduled_tokens=self._num_scheduled_tokens,
            num_steps=self._num_steps,
            num_nonfinite_sequences=self.num_nonfinite_sequences,
            speculation=SpeculationStats()
            if self._speculator is None
            else self._speculator.stats(),
            **cache_counts(self._kv),
        )

    def _waits_for_tokens(self, speculator: Speculator) -> bool:
        """Return whether the next plan waits for the tokens of the plan in flight.

        An overlapped plan need not wait.
        """
        if not self._in_flight:
            return False
        last = self._in_flight[-1]
        if last.chains or (last.plan.num_drafts and not speculator.is_trying):
            return True
        running = self._table.running
        if self._kv.states is not None and any(one.is_prefill for one in running):
            # The next plan has a prompt, and no chains.
            return False
        room = self._table.num_rows - len(running)
        if speculator.is_worth_waiting(running, room=room):
            return True
        is_guessing = speculator.is_worth_guessing(num_rows=len(running), room=room)
        return is_guessing and self._planner.may_continue(speculator, last)

    def _plan_step(self) -> PlanBuilder:
        return self._planner.plan_step(
            self._step,
            acknowledged_step=self._acknowledged_step,
            may_speculate=not self._in_flight,
        )

    def _check_output(self, output: StepOutput) -> None:
        """Raise WorkerError unless an output is that of the oldest plan in flight."""
        in_flight = self._in_flight[0] if self._in_flight else None
        if in_flight is None or output.step != in_flight.plan.step:
            due = "none" if in_flight is None else f"step {in_flight.plan.step}"
            raise WorkerError(f"Received the output of step {output.step}, but expected {due}.")
        num_sampled = in_flight.plan.num_sampled
        if len(output.token_ids) != num_sampled or len(output.logprobs) not in (0, num_sampled):
            raise WorkerError(
                f"Step {output.step} samples {num_sampled} tokens but its output has "
                f"{len(output.token_ids)}, with log-probabilities for {len(output.logprobs)}."
            )
        num_bytes = in_flight.num_head_drafts * TOKEN_ID_BYTES if output.draft_ids else 0
        if len(output.draft_ids) != num_bytes:
            raise WorkerError(
                f"Step {output.step} has {num_bytes} bytes of drafts, but its output has "
                f"{len(output.draft_ids)}."
            )


def _masked_rows(builder: PlanBuilder) -> list[MaskedRow]:
    """Return the sequences of a plan that sample under masks, in its order."""
    chained = (chain.masked_row for chain in builder.chains)
    return [
        *(MaskedRow(one) for one in builder.sampled if one.is_masked),
        *(row for row in chained if row is not None),
    ]


def _error_of_structure(sequence: Sequence, reason: FinishReason) -> str:
    matcher = None if sequence.masks is None else sequence.masks.matcher
    return matcher.error if matcher is not None and reason is FinishReason.ERROR else ""


class Admission:
    """Rejects requests that can never run, and requests that a full queue cannot hold."""

    __slots__ = ("_backlog", "_kv", "_max_model_len")

    def __init__(self, kv: KvManager, backlog: Backlog, *, max_model_len: int) -> None:
        self._kv = kv
        self._backlog = backlog
        self._max_model_len = max_model_len

    def read_prompt(self, request: Request) -> array[int]:
        """Return the tokens of a prompt, uint32. Raises InvalidRequestError.

        May be called from any thread.
        """
        prompt = request.prompt_token_ids
        if not 0 < len(prompt) < self._max_model_len:
            raise InvalidRequestError(
                f"A prompt may have 1 to {self._max_model_len - 1} tokens, not {len(prompt)}.",
                param="prompt",
            )
        try:
            # Appending to an array of signed integers takes twice as long.
            token_ids = array("I", prompt)
        except OverflowError:
            token_ids = array("I", (_MAX_TOKEN_ID + 1,))
        if max(token_ids) > _MAX_TOKEN_ID:
            raise InvalidRequestError(
                f"Token ids must be from 0 to {_MAX_TOKEN_ID}.", param="prompt"
            )
        return token_ids

    def check_request(self, request: Request) -> None:
        """Raise CapacityError, InvalidRequestError or OverloadedError unless it is accepted."""
        prompt = request.prompt_token_ids
        num_tokens = min(len(prompt) + request.sampling.max_tokens, self._max_model_len)
        needed, capacity = self._kv.groups.blocks_for(num_tokens), self._kv.pool.num_blocks
        if needed > capacity:
            raise CapacityError(needed, capacity)
        if request.generated_token_ids:
            # Another replica admitted it.
            self._check_generated(request)
        else:
            self._backlog.check_room(request.tenant, len(prompt))

    def _check_generated(self, request: Request) -> None:
        """Raise InvalidRequestError if a request cannot continue from its generated tokens."""
        generated = request.generated_token_ids
        if len(generated) != request.sampling.n or not request.open_indices:
            raise InvalidRequestError(
                f"A request with n = {request.sampling.n} cannot continue from the tokens of "
                f"{pluralize(len(generated), 'sequence')}, {len(request.open_indices)} unfinished."
            )
        num_prompt_tokens = len(request.prompt_token_ids)
        most = min(request.sampling.max_tokens, self._max_model_len - num_prompt_tokens) - 1
        for token_ids in generated:
            if token_ids and len(token_ids) > most:
                raise InvalidRequestError(
                    f"A sequence cannot continue after {len(token_ids)} generated tokens: it ends "
                    f"after {most + 1}."
                )
            if token_ids and (min(token_ids) < 0 or max(token_ids) > _MAX_TOKEN_ID):
                raise InvalidRequestError(f"Token ids must be from 0 to {_MAX_TOKEN_ID}.")


class Deadlines:
    """The deadlines of open requests, the earliest first."""

    def __init__(self, requests: Mapping[str, ActiveRequest]) -> None:
        """`requests` has the open requests by id; it is read whenever a deadline is."""
        self._requests = requests
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Return the number of kept deadlines, including deadlines of ended requests."""
        return len(self._heap)

    def add_request(self, request: Request) -> None:
        """Note the deadline of an open request, if any."""
        if request.deadline_s is None:
            return
        heapq.heappush(self._heap, (request.deadline_s, request.id))
        if len(self._heap) > 2 * len(self._requests) + _FEW:
            self._heap = [entry for entry in self._heap if self._is_open(*entry)]
            heapq.heapify(self._heap)

    def take_due(self, now_s: float) -> list[str]:
        """Return the ids of open requests past their deadline, and forget them."""
        due: list[str] = []
        while self._heap and self._heap[0][0] <= now_s:
            deadline_s, request_id = heapq.heappop(self._heap)
            if self._is_open(deadline_s, request_id):
                due.append(request_id)
        return due

    def _is_open(self, deadline_s: float, request_id: str) -> bool:
        # An id may be used again, with another deadline.
        active = self._requests.get(request_id)
        return active is not None and active.request.deadline_s == deadline_s
