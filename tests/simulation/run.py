"""Runs a scenario through the real controller, scheduler and client, and checks the results."""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.engine.engine_loop import EngineLoop
from cluster.serving.engine_client import EngineClient
from pagedray.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from pagedray.errors import CapacityError, LethalRequestError, OverloadedError, WorkerError
from pagedray.request import FinishReason, Request
from pagedray.sampling_params import SamplingParams
from tests.fakes import unused_model
from tests.scheduling.drafting import FreeDrafts, GuessingDrafter, RandomTimes
from tests.scheduling.fake_worker import EOS, undisturbed
from tests.scheduling.harness import RandomMasks
from tests.simulation.scenario import make_scenario
from tests.simulation.simulated_ranks import SimulatedRanks
from tests.simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.scheduling.event import TokenEvent
    from cluster.serving.engine_client import EngineStream
    from tests.simulation.scenario import ClientPlan, Scenario


__all__ = ["Outcome", "failing_seeds", "failure_of", "run_scenario"]

_RETRY_S = 0.05
_MOST_RETRIES = 2000
_END_S = 300.0
"""By when every request must have ended."""
_SEEDS_PER_CALL = 50


@dataclass(slots=True)
class Outcome:
    """The observations of clients, which are equal for equal scenarios."""

    log: list[str] = field(default_factory=list)
    """One line for each thing that clients saw, with its time."""
    num_deaths: int = 0
    num_late: int = 0
    num_preemptions: int = 0
    num_read_blocks: int = 0
    """Blocks that came back from the disk."""
    num_kept_hit_tokens: int = 0
    """Tokens that were found in a CPU pool that outlived a rank."""
    num_overlapped: int = 0
    """Plans that were made before the tokens of the step before were known."""


def failure_of(scenario: Scenario) -> str:
    """Return why a run is wrong, in one line; empty if it is right."""
    try:
        run_scenario(scenario)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def run_scenario(scenario: Scenario) -> Outcome:
    """Run a scenario to its end. Raises AssertionError if something is wrong."""
    logging.disable(logging.ERROR)
    try:
        return _Run(scenario).run()
    finally:
        logging.disable(logging.NOTSET)


class _WatchedController(EngineLoop):
    """A controller that keeps the error that ended it."""

    cause: Exception | None = None
    ranks: SimulatedRanks
    chance_deaths: Counter[str]
    """By request, the deaths by chance while it ran alone."""

    def _replace_ranks(self, error: WorkerError) -> None:
        lengths = self._scheduler.in_flight_lengths()
        if len(lengths) == 1 and not self.ranks.is_killed:
            self.chance_deaths.update(list(lengths))
        super()._replace_ranks(error)

    def _break_down(self, error: Exception) -> None:
        self.cause = error
        super()._break_down(error)


class _Run:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._outcome = Outcome()
        self._world = World()
        self._masks = RandomMasks(scenario.seed)
        self._ranks = SimulatedRanks(scenario, self._world, held_rows=self._held_rows)
        self._client = EngineClient(self._world.loop)
        self._controller = _WatchedController(
            _config(scenario), self._ranks, self._client, clock=self._world
        )
        self._controller.ranks, self._controller.chance_deaths = self._ranks, Counter()
        speculator = self._controller._scheduler._speculator
        if speculator is not None and scenario.has_head:
            speculator.times = RandomTimes(scenario.seed)
        elif speculator is not None:
            speculator.drafter = GuessingDrafter(scenario.seed, right=scenario.right)
            speculator.times = RandomTimes(scenario.seed) if scenario.has_gaps else FreeDrafts()
        self._client.attach_engine(self._controller)
        self._num_open = len(scenario.clients)

    def run(self) -> Outcome:
        world, controller = self._world, self._controller
        tasks = [world.loop.create_task(self._serve(one)) for one in self._scenario.clients]
        world.call_later(_END_S, controller.stop_steps)
        # What the thread of a real engine runs.
        try:
            controller._loop()
            failures = [task.exception() for task in tasks if task.done()]
            failure = next((one for one in failures if one is not None), controller.cause)
            if failure is not None:
                raise failure
            assert all(task.done() for task in tasks), "a request does not end"
            self._check_scheduler()
        finally:
            self._end_tasks(tasks)
        return self._outcome

    def _end_tasks(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        while self._world.loop.is_ready:
            self._world.loop.run_ready()
        self._ranks.close()
        self._world.loop.close()

    def _held_rows(self) -> set[int]:
        table = self._controller._scheduler._table
        return {one.state.row for one in (*table.running, *table.arriving)}

    def _check_scheduler(self) -> None:
        """Check that nothing is left of the requests."""
        scheduler = self._controller._scheduler
        kv, stats = scheduler._kv, scheduler.stats()
        assert scheduler.num_open == 0
        assert not any(kv.pool._num_references), "blocks are lost"
        assert not any(kv.cpu_pool._num_references), "blocks of the CPU pool are lost"
        assert len(scheduler._table._free_rows) == self._scenario.max_num_seqs, "rows are lost"
        assert stats.num_queued_requests == stats.num_queued_tokens == 0, "the queue is not empty"
        if kv.disk is not None and not (kv.disk._reading or kv.disk._writing):
            assert not kv.disk.pool.num_in_transit, "disk blocks are lost"
        self._outcome.num_read_blocks = stats.num_read_blocks
        self._outcome.num_kept_hit_tokens = stats.num_kept_hit_tokens
        self._outcome.num_deaths = self._ranks.num_deaths
        self._outcome.num_overlapped = self._ranks.num_overlapped
        clients = self._scenario.clients
        if not self._scenario.faults:
            num_lethal = sum(client.is_lethal for client in clients)
            most_deaths = num_lethal * (4 + math.ceil(math.log2(len(clients))))
            assert self._ranks.num_deaths <= most_deaths, "a search takes too many deaths"
        self._outcome.num_preemptions = stats.num_swap_preemptions + stats.num_recompute_preemptions

    async def _serve(self, plan: ClientPlan) -> None:
        """Be a client, then stop the engine if all others have ended."""
        try:
            chance_deaths = self._controller.chance_deaths
            await _Client(plan, self._scenario, self._world, self._masks, chance_deaths).talk(
                self._client, self._ranks, self._outcome
            )
        finally:
            self._num_open -= 1
            if not self._num_open:
                # A little later, so that what a client left behind is ended as well.
                self._world.call_later(2.0, self._controller.stop_steps)


class _Client:
    """Sends one request, and checks what comes back."""

    def __init__(
        self,
        plan: ClientPlan,
        scenario: Scenario,
        world: World,
        masks: RandomMasks,
        chance_deaths: Counter[str],
    ) -> None:
        self._plan = plan
        self._scenario = scenario
        self._world = world
        self._masks = masks
        self._chance_deaths = chance_deaths
        self._tokens: dict[int, list[int]] = {index: [] for index in range(plan.n)}
        self._reasons: dict[int, FinishReason] = {}
        self._finished: set[int] = set()
        """Sequences that it ended itself."""
        self._has_cancelled = False

    async def talk(self, client: EngineClient, ranks: SimulatedRanks, outcome: Outcome) -> None:
        plan = self._plan
        await asyncio.sleep(plan.arrival_s)
        ranks.seeds.tenants[plan.number] = plan.tenant
        if plan.bad_position is not None:
            ranks.seeds.bad_positions[plan.number] = plan.bad_position
        stream = await self._opened(client, outcome)
        if stream is None:
            return
        async with stream:
            if plan.cancels_after == 0:
                self._has_cancelled = True
                return
            async for events in stream:
                for event in events:
                    self._take(event)
                    self._note(outcome, f"{event.index} {event.token_ids} {event.finish_reason}")
                self._finish_sequences(stream)
                num_tokens = sum(map(len, self._tokens.values()))
                if plan.cancels_after is not None and num_tokens >= plan.cancels_after:
                    self._has_cancelled = True
                    break
                await asyncio.sleep(plan.read_pause_s)
        self._check(ranks)

    async def _opened(self, client: EngineClient, outcome: Outcome) -> EngineStream | None:
        """Return the stream of the request, or None if it is rejected for good."""
        for _ in range(_MOST_RETRIES):
            try:
                return client.open_stream([self._request()])
            except OverloadedError:
                await asyncio.sleep(_RETRY_S)
            except CapacityError:
                self._note(outcome, "does not fit")
                return None
            except LethalRequestError:
                self._note(outcome, "is lethal")
                assert self._may_be_accused, "an innocent request is lethal"
                return None
        raise AssertionError(f"client {self._plan.number} is rejected forever")

    def _finish_sequences(self, stream: EngineStream) -> None:
        """End the sequences that have as many tokens as the plan says."""
        if self._plan.finishes_after is None:
            return
        for index, token_ids in self._tokens.items():
            is_open = index not in self._reasons and index not in self._finished
            if is_open and len(token_ids) >= self._plan.finishes_after:
                self._finished.add(index)
                stream.finish_sequence(self._id, index)

    @property
    def _may_be_accused(self) -> bool:
        """Whether the ranks have died, twice by chance, whenever it ran alone."""
        return self._plan.is_lethal or self._chance_deaths[self._id] >= 2

    @property
    def _id(self) -> str:
        return f"request-{self._plan.number}"

    def _request(self) -> Request:
        plan = self._plan
        deadline_s = None
        if plan.deadline_s is not None:
            deadline_s = self._world.now_s() + plan.deadline_s
        return Request(
            id=self._id,
            prompt_token_ids=plan.prompt,
            sampling=SamplingParams(
                n=plan.n,
                max_tokens=plan.max_tokens,
                ignore_eos=plan.ignores_eos,
                thinking_token_budget=plan.num_unmasked if plan.is_masked else None,
            ),
            seed=plan.number,
            eos_token_ids=(EOS,),
            tenant=plan.tenant,
            priority=plan.priority,
            deadline_s=deadline_s,
            grammar=self._masks if plan.is_masked else None,
        )

    def _take(self, event: TokenEvent) -> None:
        assert event.request_id == self._id, "an event of another request"
        assert event.index not in self._reasons, "an event follows the last"
        assert event.index not in self._finished, "an event follows the client's end"
        self._tokens[event.index] += event.token_ids
        if event.finish_reason is not None:
            self._reasons[event.index] = event.finish_reason
        if event.is_lethal:
            assert self._may_be_accused, "an innocent request is lethal"

    def _check(self, ranks: SimulatedRanks) -> None:
        """Check the tokens and the end of each sequence against those of it alone."""
        plan = self._plan
        for index, token_ids in self._tokens.items():
            expected, expected_reason = undisturbed(
                self._request(),
                index,
                max_model_len=self._scenario.max_model_len,
                bad_length=plan.bad_length,
            )
            what = f"sequence {index} of client {plan.number}"
            assert token_ids == expected[: len(token_ids)], f"{what} has other tokens"
            reason = self._reasons.get(index)
            if reason is None:
                is_ended = self._has_cancelled or index in self._finished
                assert is_ended, f"{what} has no end"
            elif reason is FinishReason.ABORT:
                assert plan.deadline_s is not None, f"{what} was aborted"
            elif reason is FinishReason.ERROR:
                may_fail = (
                    plan.bad_length is not None
                    or self._may_be_accused
                    or (plan.number, index) in ranks.seeds.bad_sequences
                )
                assert may_fail, f"{what} has failed"
            else:
                assert token_ids == expected, f"{what} lacks tokens"
                assert reason is expected_reason, f"{what} ended for another reason"

    def _note(self, outcome: Outcome, what: str) -> None:
        outcome.log.append(f"{self._world.now_s():.9f} {self._plan.number} {what}")


def _config(scenario: Scenario) -> EngineConfig:
    has_disk = scenario.has_prefix_cache and scenario.num_disk_blocks > 0
    return EngineConfig(
        model=unused_model(max_positions=scenario.max_model_len),
        cache=CacheConfig(
            block_size=scenario.block_size,
            enable_prefix_cache=scenario.has_prefix_cache,
            disk_cache_folder="none" if has_disk else None,
            disk_cache_bytes=scenario.num_disk_blocks if has_disk else None,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=scenario.max_num_seqs,
            max_num_batched_tokens=scenario.max_num_batched_tokens,
            max_queued_requests=scenario.max_queued_requests,
            preemption=scenario.preemption,
            itl_target_ms=scenario.itl_target_ms,
        ),
        speculation=SpeculationConfig(
            num_speculative_tokens=scenario.num_drafts,
            method="mtp" if scenario.has_head else "ngram",
        )
        if scenario.num_drafts
        else None,
    )


def failing_seeds(seeds: range, *, num_processes: int) -> Iterator[int]:
    """Yield the seeds whose runs are wrong, in any order."""
    parts = [
        seeds[first : first + _SEEDS_PER_CALL] for first in range(0, len(seeds), _SEEDS_PER_CALL)
    ]
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        for found in pool.imap_unordered(failing_seeds_of, parts):
            yield from found


def failing_seeds_of(seeds: range) -> list[int]:
    """Return the seeds whose runs are wrong."""
    return [seed for seed in seeds if failure_of(make_scenario(seed))]
