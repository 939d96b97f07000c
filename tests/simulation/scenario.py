"""The events of a simulated run: drawn from a seed, and shrunk while the run still fails."""

from __future__ import annotations

import random
from dataclasses import Field, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from pagedray.config import Preemption
from pagedray.layout import num_held_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["ClientPlan", "FaultPlan", "Scenario", "make_scenario", "shrink"]

FaultKind = Literal["death", "hang", "failure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPlan:
    """A client and its request."""

    number: int
    """Also the seed of its request, from 1."""
    arrival_s: float = 0.0
    prompt: tuple[int, ...] = (1,)
    tenant: str = ""
    priority: int = 0
    n: int = 1
    max_tokens: int = 4
    ignores_eos: bool = True
    is_masked: bool = False
    num_unmasked: int = 0
    """Tokens that are sampled before the first mask."""
    deadline_s: float | None = None
    """After its arrival."""
    read_pause_s: float = 0.0
    """How long it waits before it reads again."""
    cancels_after: int | None = None
    """Tokens after which it goes away."""
    finishes_after: int | None = None
    """Tokens of a sequence after which it ends it, as with a stop string."""
    bad_length: int | None = None
    """The length at which its logits are not finite."""
    bad_position: int | None = None
    """The position from which on its values are not finite."""
    lethal_length: int | None = None
    """The length at which its ranks die, each time."""
    lethal_step: int | None = None
    """The step after each start, from 1, from which its ranks die if it runs."""
    lethal_s: float | None = None
    """The time after each start from which its ranks die if it runs."""

    @property
    def is_lethal(self) -> bool:
        """Whether it kills its ranks."""
        lethal = (self.lethal_length, self.lethal_step, self.lethal_s)
        return any(one is not None for one in lethal)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """A fault of a rank."""

    time_s: float
    rank: int
    kind: FaultKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run; equal ones are equal in everything that happens."""

    seed: int
    clients: tuple[ClientPlan, ...]
    faults: tuple[FaultPlan, ...] = ()
    num_ranks: int = 1
    block_size: int = 4
    num_blocks: int = 24
    num_cpu_blocks: int = 0
    num_disk_blocks: int = 0
    """Used if there are blocks on the CPU and a prefix cache."""
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 60
    max_queued_requests: int = 100
    preemption: Preemption = "auto"
    has_prefix_cache: bool = True
    step_s: float = 0.01
    itl_target_ms: float | None = None
    channel_delay_s: float = 0.0
    windows: tuple[int | None, ...] = (None,)
    """The window of each group of layers."""
    state_blocks: int = 0
    """Blocks of the recurrent state of a sequence."""
    state_grid: int = 4
    num_drafts: int = 0
    """Most drafts of a sequence in a step."""
    right: float = 0.0
    """The probability that a draft is right."""
    has_head: bool = False
    """Whether the ranks guess the drafts."""
    has_gaps: bool = False
    """Whether it may be worth it to verify drafts behind drafts that are not verified yet."""


_WINDOWED = 3
"""In one scenario of so many, there are several groups of layers."""
_STATEFUL = 5
"""In one scenario of so many, layers have a recurrent state."""
_RETURNING = 4
"""In one scenario of so many, prompts come back."""
_DRAFTED = 7
"""In three scenarios of so many, sequences have drafts; in one of these, the ranks guess them."""
_LETHAL = 16
"""In one scenario of so many, requests kill their ranks."""


def make_scenario(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    scenario = _make_layered(seed)
    if seed % _DRAFTED in (1, 2, 4):
        draws = random.Random(f"drafts {seed}")
        scenario = replace(
            scenario, num_drafts=draws.randint(1, 9), right=draws.choice((0.3, 0.8, 0.95, 1.0))
        )
    if seed % _DRAFTED == 4:
        scenario = replace(scenario, has_gaps=True)
    if seed % _DRAFTED == 2:
        # Steps overlap only while nothing waits.
        clients = scenario.clients[: draws.choice((1, 2, 3, 40))]
        scenario = replace(
            scenario,
            has_head=True,
            clients=tuple(
                replace(
                    one,
                    n=max(one.n, 2),
                    max_tokens=max(one.max_tokens, 12),
                    num_unmasked=3 * one.num_unmasked,
                )
                for one in clients
            ),
            max_num_seqs=draws.choice((3, 8)),
            max_num_batched_tokens=max(scenario.max_num_batched_tokens, 5),
            num_blocks=scenario.num_blocks * draws.choice((1, 1, 2)),
        )
    return scenario if seed % _STATEFUL else make_stateful(scenario)


def make_stateful(scenario: Scenario) -> Scenario:
    """Return a scenario with recurrent states, for which the pools have more blocks."""
    draws = random.Random(f"states {scenario.seed}")
    state_blocks = draws.choice((1, 2, 5))
    clients = [
        replace(one, bad_position=draws.randint(0, 12)) if draws.random() < 0.05 else one
        for one in scenario.clients
    ]
    return replace(
        scenario,
        clients=tuple(clients),
        state_blocks=state_blocks,
        state_grid=draws.choice((1, 2, 4)),
        num_blocks=scenario.num_blocks + state_blocks * draws.choice((1, 2, 4)),
        num_cpu_blocks=scenario.num_cpu_blocks * draws.choice((1, 1 + state_blocks)),
        num_disk_blocks=scenario.num_disk_blocks * (1 + state_blocks),
    )


def _make_layered(seed: int) -> Scenario:
    """Return the scenario of a seed with one group of layers or several."""
    scenario = _make_uniform(seed)
    if seed % _WINDOWED:
        return scenario
    draws = random.Random(-1 - seed)
    window = draws.choice((1, 2, 3, 5, 8, 13))
    windows = [window, draws.choice((window, 4))][: draws.choice((1, 1, 2))]
    groups = (*[None] * draws.choice((0, 1, 1, 1, 2)), *windows)
    num_blocks = num_held_blocks(
        scenario.num_blocks * scenario.block_size,
        windows=groups,
        block_size=scenario.block_size,
        step_tokens=scenario.max_num_batched_tokens,
    )
    return replace(
        scenario,
        windows=groups,
        num_blocks=num_blocks,
        num_cpu_blocks=scenario.num_cpu_blocks * len(groups),
        num_disk_blocks=scenario.num_disk_blocks * len(groups),
    )


def _make_uniform(seed: int) -> Scenario:
    """Return the scenario of a seed with one group of layers."""
    draws = random.Random(seed)
    if seed % _RETURNING == 0:
        return _make_returning(seed, draws)
    if seed % _LETHAL == 1:
        return _make_lethal(seed, draws)
    block_size = draws.choice((1, 2, 4))
    num_blocks = draws.randint(16, 40) // block_size + 2
    max_model_len = num_blocks * block_size - draws.randint(0, 9)
    num_ranks = draws.choice((1, 1, 2))
    num_clients = draws.randint(1, 12)
    has_masks = draws.random() < 0.3
    faults = [
        FaultPlan(
            time_s=draws.random() * 1.5,
            rank=draws.randrange(num_ranks),
            kind=draws.choice(get_args(FaultKind)),
        )
        for _ in range(draws.choice((0, 0, 0, 1, 2)))
    ]
    return Scenario(
        seed=seed,
        clients=tuple(
            _make_client(draws, number, most_tokens=max_model_len - 1, has_masks=has_masks)
            for number in range(1, num_clients + 1)
        ),
        faults=tuple(sorted(faults, key=lambda fault: fault.time_s)),
        num_ranks=num_ranks,
        block_size=block_size,
        num_blocks=num_blocks,
        num_cpu_blocks=draws.choice((0, 4, 16, 40)),
        max_num_seqs=draws.randint(1, 5),
        max_num_batched_tokens=draws.choice((1, 3, 5, 8, 30)),
        max_model_len=max_model_len,
        max_queued_requests=draws.choice((2, 100)),
        preemption=draws.choice(("swap", "swap", "recompute", "auto")),
        has_prefix_cache=draws.random() < 0.75,
        step_s=draws.choice((0.001, 0.01)),
        channel_delay_s=draws.choice((0.0, 0.002, 0.02)),
        itl_target_ms=draws.choice((None, None, 0.1, 10.0)),
        num_disk_blocks=draws.choice((0, 4, 40)),
    )


def _make_returning(seed: int, draws: random.Random) -> Scenario:
    """Return a scenario of prompts that come back, of which the pools hold a few."""
    block_size = draws.choice((1, 2))
    num_ranks = draws.choice((1, 2))
    step_s = draws.choice((0.001, 0.01))
    clients = []
    for number in range(1, 41):
        token_id = draws.randint(0, 6)
        clients.append(
            ClientPlan(
                number=number,
                arrival_s=draws.random() * 100 * step_s,
                prompt=(*(token_id, 1) * 6, draws.randint(0, 1)),
                tenant=draws.choice(("", "", "other")),
                max_tokens=draws.choice((1, 4)),
                cancels_after=0 if draws.random() < 0.1 else None,
                bad_length=14 if draws.random() < 0.02 else None,
            )
        )
    faults = [
        FaultPlan(
            time_s=step * step_s,
            rank=draws.randrange(num_ranks),
            kind=draws.choice(get_args(FaultKind)),
        )
        for step in (30, 50, 70)
        if draws.random() < 0.3
    ]
    return Scenario(
        seed=seed,
        clients=tuple(clients),
        faults=tuple(faults),
        num_ranks=num_ranks,
        block_size=block_size,
        num_blocks=20 // block_size,
        num_cpu_blocks=draws.choice((8, 20, 60)),
        num_disk_blocks=draws.choice((10, 60)),
        max_num_seqs=draws.randint(1, 3),
        max_num_batched_tokens=draws.choice((5, 30)),
        max_model_len=20,
        preemption=draws.choice(("swap", "auto")),
        step_s=step_s,
        channel_delay_s=draws.choice((0.0, 0.002)),
    )


def _make_lethal(seed: int, draws: random.Random) -> Scenario:
    """Return a scenario of requests among which one or two kill their ranks."""
    step_s = draws.choice((0.001, 0.01))
    num_clients = draws.choice((1, 2, 7, 32))
    clients = []
    for number in range(1, num_clients + 1):
        prompt = tuple(draws.randint(0, 6) for _ in range(draws.choice((1, 6, 30))))
        clients.append(
            ClientPlan(
                number=number,
                arrival_s=draws.choice((0.0, draws.random() * 30 * step_s)),
                prompt=prompt,
                max_tokens=draws.choice((1, 20, 60)),
            )
        )
    for _ in range(min(num_clients, draws.choice((1, 1, 2)))):
        index = draws.randrange(num_clients)
        length = len(clients[index].prompt)
        lethal: dict[str, Any] = draws.choice(  # Any: one field of several types
            (
                {"lethal_length": length + draws.choice((0, 1, 10))},
                {"lethal_step": draws.randint(1, 10)},
                {"lethal_s": draws.choice((0.0, 3.0, 10.0, 20.0)) * step_s},
            )
        )
        clients[index] = replace(clients[index], max_tokens=60, **lethal)
    return Scenario(
        seed=seed,
        clients=tuple(clients),
        num_ranks=draws.choice((1, 2)),
        block_size=4,
        num_blocks=draws.choice((60, 800)),
        num_cpu_blocks=draws.choice((0, 40)),
        max_num_seqs=draws.choice((5, 40)),
        max_num_batched_tokens=draws.choice((8, 64, 400)),
        max_model_len=100,
        step_s=step_s,
        channel_delay_s=draws.choice((0.0, 0.002)),
    )


def _make_client(
    draws: random.Random, number: int, *, most_tokens: int, has_masks: bool
) -> ClientPlan:
    stem = draws.choice(([1] * 30, [1, 2] * 15, [2] * 30))
    prompt = stem[: draws.randint(0, 12)] + [
        draws.randint(0, 4) for _ in range(draws.randint(1, 6))
    ]
    return ClientPlan(
        number=number,
        arrival_s=draws.choice((0.0, draws.random() * 0.3)),
        prompt=tuple(prompt[:most_tokens]),
        tenant=draws.choice(("", "", "other")),
        priority=draws.choice((0, 0, 0, 1)),
        n=draws.choice((1, 1, 1, 2, 4)),
        max_tokens=draws.choice((1, 4, 12, 30)),
        ignores_eos=draws.random() < 0.6,
        is_masked=has_masks and draws.random() < 0.6,
        num_unmasked=number % 5,
        deadline_s=draws.random() * 0.3 if draws.random() < 0.1 else None,
        read_pause_s=draws.choice((0.0, 0.0, 0.05)),
        cancels_after=draws.randint(0, 8) if draws.random() < 0.15 else None,
        finishes_after=draws.randint(1, 8) if draws.random() < 0.15 else None,
        bad_length=len(prompt) + draws.randint(0, 6) if draws.random() < 0.05 else None,
        lethal_length=len(prompt) + draws.randint(0, 6) if draws.random() < 0.02 else None,
    )


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """Return a scenario that fails too, and of which no simpler neighbor does."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for simpler in _simpler(scenario):
            if fails(simpler):
                scenario, is_smaller = simpler, True
                break
    return scenario


_FREE = {"num_ranks", "channel_delay_s", "itl_target_ms", "windows", "state_blocks", "has_head"}
_FREE |= {"has_gaps", "num_drafts"}
"""Fields of a scenario that a simpler scenario need not have."""


def _simpler(scenario: Scenario) -> Iterator[Scenario]:
    """Yield scenarios with less in them, those with much less first."""
    clients, faults = scenario.clients, scenario.faults
    if len(clients) > 3:
        half = len(clients) // 2
        yield replace(scenario, clients=clients[:half])
        yield replace(scenario, clients=clients[half:])
    for index in range(len(clients)):
        if len(clients) > 1:
            yield replace(scenario, clients=clients[:index] + clients[index + 1 :])
    for index in range(len(faults)):
        yield replace(scenario, faults=faults[:index] + faults[index + 1 :])
    for field in fields(Scenario):
        if field.name in _FREE and _value(scenario, field) != field.default:
            without = tuple(fault for fault in faults if fault.rank == 0)
            yield replace(scenario, faults=without, **_default_of(field))
    for index, client in enumerate(clients):
        for field in fields(ClientPlan):
            is_free = field.name not in ("number", "prompt")
            if is_free and _value(client, field) != field.default:
                simple = replace(client, **_default_of(field))
                yield replace(scenario, clients=(*clients[:index], simple, *clients[index + 1 :]))


def _default_of(field: Field[Any]) -> dict[str, Any]:  # Any: the type of the field
    return {field.name: field.default}


def _value(record: Scenario | ClientPlan, field: Field[Any]) -> object:  # Any: as above
    return getattr(record, field.name)
