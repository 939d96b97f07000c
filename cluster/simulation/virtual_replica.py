"""A scheduler in virtual time: the ranks are a model of how long steps and copies take.

Plans run one step ahead, as the controller's do, and copies between the pools concurrently. Equal
calls give equal runs.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from array import array
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from cluster.scheduling.draft_estimates import size_of
from cluster.scheduling.scheduler import MAX_PLANS_IN_FLIGHT, Scheduler
from cluster.simulation.virtual_copies import VirtualCopies
from pagedray.batch import StepOutput, pack_token_ids
from pagedray.errors import RequestError
from pagedray.request import Request
from pagedray.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.scheduling.kv_manager import KvOptions
    from cluster.scheduling.sequence import Sequence as ScheduledSequence
    from cluster.scheduling.speculation import Speculator
    from cluster.simulation.step_cost import StepCost
    from cluster.simulation.virtual_disk import VirtualDisk
    from pagedray.batch import StepPlan
    from pagedray.config import SchedulerConfig

__all__ = [
    "EOS",
    "VirtualCall",
    "VirtualDrafter",
    "VirtualHead",
    "VirtualReplica",
    "distinct_prompt",
]

EOS = 2
TOKEN = 7
"""The token that sequences sample before they end, unless the controller guesses tokens."""
_NUM_TOKENS = 101
"""Tokens that sequences sample in turn if it does: guesses at other positions are then wrong."""


@dataclass(slots=True, kw_only=True, eq=False)
class VirtualCall:
    """A request and its outcome."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    """Tokens after which each sequence ends."""
    arrival_step: int = -1
    """Steps that had ended when it arrived."""
    start_step: int = -1
    """Steps that ended before the step that first ran it."""
    first_token_step: int = -1
    token_times_s: array[float] = field(default_factory=lambda: array("d"))
    """When its tokens came, of all its sequences."""
    end_s: float | None = None
    error: str = ""
    """The reason if the request was rejected; otherwise empty."""
    num_open: int = field(default=1)

    @property
    def first_token_s(self) -> float | None:
        """When its first token came."""
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_times_s)

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        assert self.first_token_s is not None
        return self.first_token_s - self.arrival_s

    @property
    def num_steps_to_first_token(self) -> int:
        """Steps that ended from its arrival to its first token."""
        return self.first_token_step - self.arrival_step


class VirtualDrafter:
    """Guesses the tokens of virtual replicas, each right with the same probability.

    Guesses of the same token are equal, however many guesses a step verifies.
    """

    def __init__(self, *, acceptance: float) -> None:
        self._acceptance = acceptance
        self._guesses: dict[ScheduledSequence, tuple[random.Random, list[int]]] = {}

    def propose(self, sequence: ScheduledSequence, limit: int) -> list[int]:
        if sequence not in self._guesses:
            self._guesses[sequence] = random.Random(repr(sequence.order)), []
        rng, guesses = self._guesses[sequence]
        first = len(sequence.token_ids)
        while len(guesses) < first + limit:
            is_wrong = rng.random() >= self._acceptance
            guesses.append(TOKEN + 2 * (len(guesses) % _NUM_TOKENS) + is_wrong)
        return guesses[first : first + limit]


class VirtualHead:
    """Guesses tokens behind steps, as draft heads on ranks; each is right by the same chance.

    Guesses of sequences are wrong if it has not read all of their tokens.
    """

    def __init__(self, *, acceptance: float) -> None:
        self.acceptance = acceptance
        self.num_fed = 0
        """Steps of which it has read the tokens."""
        self._rng = random.Random(5)
        self._unread: set[int] = set()
        """Rows with tokens that it has not read."""
        self._guesses: dict[int, list[int]] = {}
        """Behind the last step, by row."""
        self._num_wrong: dict[int, int] = {}
        """Drafts of the last step that were wrong, by row."""

    def num_wrong(self, row: int, plan: StepPlan) -> int:
        """Return by how much the positions of a row in the next plan are too high."""
        return self._num_wrong[row] if plan.is_overlapped else 0

    def read_step(self, plan: StepPlan, token_ids: Sequence[int]) -> bytes:
        """Return the guesses behind a step that has sampled tokens."""
        self._unread -= {start.row for start in plan.starts}
        self.num_fed += plan.feeds_head
        if not plan.feeds_head:
            assert not plan.num_drafts
            self._unread.update(one.row for one in plan.sequences)
        sampled: dict[int, list[int]] = {}
        rows = (one.row for one in plan.sequences if one.is_sampled)
        for row, token_id in zip(rows, token_ids, strict=True):
            sampled.setdefault(row, []).append(token_id)
        draft_ids = iter(array("i", plan.decodes.draft_ids))
        is_guessed = plan.is_overlapped and not plan.decodes.draft_ids
        self._num_wrong = {}
        for row, ids in sampled.items():
            number = len(ids) - 1
            known = self._guesses[row] if is_guessed else draft_ids
            pairs = zip([*itertools.islice(known, number)], ids, strict=False)
            num_right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            self._num_wrong[row] = number - num_right
        self._guesses = {row: self._guess(row, plan.num_drafts) for row in sampled}
        return pack_token_ids([one for ids in self._guesses.values() for one in ids])

    def _guess(self, row: int, number: int) -> list[int]:
        acceptance = 0.0 if row in self._unread else self.acceptance
        return [TOKEN + (self._rng.random() >= acceptance) for _ in range(number)]


class _Flight(NamedTuple):
    """A step that was launched."""

    step: int
    token_ids: list[int]
    """The tokens that it samples."""
    draft_ids: bytes
    """The guesses of a draft head behind it."""
    forward_s: float
    idle_s: float
    """How long the ranks waited for its plan."""
    ended_s: float
    copied_s: float
    """When it and all copies up to it have ended."""


class VirtualReplica:
    """Runs requests through a scheduler."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KvOptions,
        cost: StepCost,
        *,
        max_model_len: int,
        disk: VirtualDisk | None = None,
        speculator: Speculator | None = None,
        head: VirtualHead | None = None,
    ) -> None:
        """The `disk` stores the disk blocks of `kv`; without a disk, `kv` must have none.

        Sequences have drafts if there is a `speculator`, which may need a draft `head`.
        """
        assert disk is not None or not kv.num_disk_blocks
        self.scheduler = Scheduler(
            config=config,
            kv=replace(kv, hash_key=b"the key of simulations"),
            max_model_len=max_model_len,
            speculator=speculator,
        )
        self._disk = disk if self.scheduler.has_disk else None
        self.block_size = kv.block_size
        self._cost = cost
        self._num_tokens = _NUM_TOKENS if speculator is not None and head is None else 1
        # Without a head, there are no guesses, but positions may be too high.
        self._head = head or VirtualHead(acceptance=0.0) if speculator is not None else None
        self._copies = VirtualCopies(cost, num_blocks=kv.num_blocks)
        self._graphs: set[tuple[int, int]] = set()
        """Numbers of rows, and of drafts behind these, of steps so far."""
        self.now_s = 0.0
        self.num_steps = 0
        """Steps that have ended."""
        self.num_generated_tokens = 0
        self._arrivals: list[tuple[float, int, VirtualCall, Request]] = []
        self._calls: dict[str, VirtualCall] = {}
        """Calls that have not ended."""
        self._rows: dict[int, tuple[VirtualCall, int]] = {}
        """The call of each row, and the length at which it ends."""
        self._in_flight: deque[_Flight] = deque()
        self._step_ended_s = 0.0
        """When the last step that was launched ends."""
        self._unacknowledged: deque[_Flight] = deque()
        """Steps with taken output, but without acknowledgement."""
        self._numbers = itertools.count()

    def submit(
        self,
        prompt: Sequence[int],
        *,
        num_output_tokens: int,
        arrival_s: float = 0.0,
        tenant: str = "",
        n: int = 1,
        has_limit: bool = True,
        anchors: tuple[int, ...] = (),
    ) -> VirtualCall:
        """Add a request; its sequences end with a stop token unless it `has_limit`."""
        number = next(self._numbers)
        request = Request(
            id=f"{number:032x}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(
                max_tokens=num_output_tokens if has_limit else 10**9,
                ignore_eos=has_limit,
                temperature=0.0,
                n=n,
            ),
            seed=number,
            eos_token_ids=(EOS,),
            tenant=tenant,
            anchors=anchors,
        )
        call = VirtualCall(
            arrival_s=arrival_s,
            num_prompt_tokens=len(prompt),
            num_output_tokens=num_output_tokens,
            num_open=n,
        )
        heapq.heappush(self._arrivals, (arrival_s, number, call, request))
        return call

    def run(self, *, until_s: float = float("inf"), num_steps: int = 10**9) -> None:
        """Run until every request has ended, or until a time or a number of steps."""
        last_step = self.num_steps + num_steps
        while self.now_s < until_s and self.num_steps < last_step:
            self._admit_arrivals()
            if self.scheduler.has_work:
                self._turn()
            elif self._arrivals:
                self.now_s = self._arrivals[0][0]
            else:
                return

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._arrivals) or self.scheduler.has_work

    def _admit_arrivals(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.now_s:
            _, _, call, request = heapq.heappop(self._arrivals)
            call.arrival_step = self.num_steps
            try:
                self.scheduler.add_request(request)
            except RequestError as error:
                call.error = str(error)
                continue
            self._calls[request.id] = call

    def _turn(self) -> None:
        """Make a plan, and wait for the oldest step if there is no other or no room for more."""
        while self._unacknowledged and self._unacknowledged[0].copied_s <= self.now_s:
            self.scheduler.acknowledge(self._unacknowledged.popleft().step)
        for report in () if self._disk is None else self._disk.take_reports(self.now_s):
            self.scheduler.note_disk_report(report)
        plan = self.scheduler.schedule(self.now_s)
        if plan is not None:
            self._launch(plan)
        if self._in_flight and (plan is None or len(self._in_flight) == MAX_PLANS_IN_FLIGHT):
            self._end_step()
        elif plan is None:
            # Every sequence waits for copies, or for reads from the disk.
            self.now_s = self._next_end_s()
            if self._arrivals:
                self.now_s = min(self.now_s, self._arrivals[0][0])

    def _next_end_s(self) -> float:
        """Return when the next copies between the pools, reads or writes end."""
        ends_s = [] if self._disk is None else [self._disk.next_report_s]
        ends_s += [one.copied_s for one in self._unacknowledged]
        end_s = min(ends_s, default=math.inf)
        assert end_s < math.inf, "the scheduler waits for nothing"
        return end_s

    def _launch(self, plan: StepPlan) -> None:
        if self._disk is not None:
            self._disk.launch(plan, self.now_s)
        token_ids = self._sample(plan)
        draft_ids = b"" if self._head is None else self._head.read_step(plan, token_ids)
        forward_s = self._cost.forward_s(plan)
        if not self._in_flight:
            self.now_s += self._cost.gap_s
            forward_s += self._cost.launch_s
        idle_s = max(self.now_s - self._step_ended_s, 0.0)
        steps_ended_s = max(self.now_s, self._step_ended_s)
        begins_s = self._copies.launch(plan, now_s=self.now_s, steps_ended_s=steps_ended_s)
        graph = size_of(len(plan.decodes)), plan.num_drafts
        if plan.decodes.rows and not plan.chunks and graph not in self._graphs:
            self._graphs.add(graph)
            forward_s += self._cost.capture_s
        if self._head is not None and plan.feeds_head:
            forward_s += self._cost.feed_s
        ended_s = self._step_ended_s = begins_s + forward_s
        copied_s = max(ended_s, self._copies.ended_s)
        self._in_flight.append(
            _Flight(plan.step, token_ids, draft_ids, forward_s, idle_s, ended_s, copied_s)
        )

    def _sample(self, plan: StepPlan) -> list[int]:
        for start in plan.starts:
            call = self._calls[f"{start.seed:032x}"]
            if call.start_step < 0:
                call.start_step = self.num_steps + len(self._in_flight)
            self._rows[start.row] = call, start.num_prompt_tokens + call.num_output_tokens
        sampled = [one for one in plan.sequences if one.is_sampled]
        ends = [one.first_position + one.num_tokens for one in sampled]
        if self._head is not None:
            wrong = (self._head.num_wrong(one.row, plan) for one in sampled)
            ends = [end - number for end, number in zip(ends, wrong, strict=True)]
        return [
            EOS if end + 1 == self._rows[one.row][1] else TOKEN + 2 * (end % self._num_tokens)
            for one, end in zip(sampled, ends, strict=True)
        ]

    def _end_step(self) -> None:
        flight = self._in_flight.popleft()
        self.now_s = max(self.now_s, flight.ended_s)
        self.num_steps += 1
        num_swapped, swap_s = self._copies.take_measurement(self.now_s)
        events = self.scheduler.update(
            StepOutput(
                flight.step,
                flight.token_ids,
                forward_s=flight.forward_s,
                swap_s=swap_s,
                num_swapped=num_swapped,
                draft_ids=flight.draft_ids,
                idle_s=flight.idle_s,
            )
        )
        self._unacknowledged.append(flight)
        for event in events:
            call = self._calls[event.request_id]
            self.num_generated_tokens += len(event.token_ids)
            if not call.token_times_s:
                call.first_token_step = self.num_steps
            call.token_times_s.extend(self.now_s for _ in event.token_ids)
            if event.finish_reason is not None:
                call.num_open -= 1
                if not call.num_open:
                    call.end_s = self.now_s
                    del self._calls[event.request_id]


def distinct_prompt(number: int, num_tokens: int) -> list[int]:
    """Return a prompt that shares no block with the prompts of other numbers."""
    return [1000 + number] * num_tokens
