"""The checker finds every planted defect, and nothing in histories without one."""

import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chaos.checker import STANDSTILL_S, Verdict, check
from tests.chaos.events import (
    CallAccepted,
    CallEnded,
    CallSent,
    ClientLag,
    Event,
    FaultHealed,
    FaultInjected,
    Leftovers,
    Readiness,
    Reference,
    ReferenceSequence,
    Resources,
    RunEnded,
    SequenceEnded,
    Tokens,
)

STEP_S = 0.5
FAULT_S, HEALED_S = 2.0, 6.0


def text_of(token_id: int) -> str:
    return f"{token_id} "


def reference(spec: str, sequences: list[list[int]]) -> Reference:
    return Reference(
        at_s=0.0,
        spec=spec,
        sequences=tuple(
            ReferenceSequence(
                token_ids=tuple(tokens), text="".join(map(text_of, tokens)), reason="length"
            )
            for tokens in sequences
        ),
    )


def call_events(
    name: str, spec: Reference, begin_s: float, frontend: str, generator: random.Random
) -> list[Event]:
    """Return the events of a call that gets all that it should."""
    at_s = begin_s
    events: list[Event] = [
        CallSent(at_s=at_s, call=name, spec=spec.spec, frontend=frontend, tenant="ann"),
        CallAccepted(at_s=at_s, call=name),
    ]
    lengths = Counter[int]()
    waiting = {index: list(one.token_ids) for index, one in enumerate(spec.sequences)}
    while waiting:
        index = generator.choice(list(waiting))
        size = generator.randint(1, 5)
        gained, waiting[index] = waiting[index][:size], waiting[index][size:]
        at_s += STEP_S
        is_grpc, text = frontend == "grpc", "".join(map(text_of, gained))
        events.append(
            Tokens(
                at_s=at_s,
                until_s=at_s + 0.2,
                call=name,
                sequence=index,
                begin=lengths[index],
                token_ids=tuple(gained) if is_grpc else (),
                text=text,
            )
        )
        lengths[index] += len(gained) if is_grpc else len(text)
        if not waiting[index]:
            del waiting[index]
            events.append(SequenceEnded(at_s=at_s, call=name, sequence=index, reason="length"))
    number = sum(len(one.token_ids) for one in spec.sequences)
    events.append(CallEnded(at_s=at_s, call=name, status="ok", num_generated=number))
    return events


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Some calls on a server that is ready all the time, and a fault among them."""
    generator = random.Random(draw(st.integers(0, 2**32)))
    # Distinct tokens: a lost or repeated one is then always visible.
    references = [
        reference(f"spec-{index}", [generator.sample(range(1000), 30) for _ in range(index + 1)])
        for index in range(2)
    ]
    calls = [
        call_events(f"call-{index}", references[index % 2], index * 0.3, frontend, generator)
        for index, frontend in enumerate(
            draw(st.lists(st.sampled_from(("grpc", "http")), min_size=2, max_size=5))
        )
    ]
    events: list[Event] = [
        held("before"),
        Readiness(at_s=0.0, state="ready"),
        *(event for call in calls for event in call),
        FaultInjected(at_s=FAULT_S, number=1, faults=("a",), may_end_streams=False, limit_s=60.0),
        FaultHealed(at_s=HEALED_S, number=1),
    ]
    events.sort(key=lambda event: event.at_s)
    end_s = events[-1].at_s
    return [*references, *events, held("after"), RunEnded(at_s=end_s), Leftovers(
        at_s=end_s, processes=(), shared_memory=()
    )]  # fmt: skip


def held(when: str, **changes: int) -> Resources:
    given = {"num_processes": 9, "num_descriptors": 90, "num_shared_memory": 3, "num_calls": 0}
    given |= {"num_blocks": 64, "num_free_blocks": 64} | changes
    return Resources(at_s=0.0, when=when, rss_mib=100.0, **given)


def last_call(events: list[Event], kind: type[Event]) -> int:
    """Return the place of the last event of a kind."""
    return max(place for place, event in enumerate(events) if type(event) is kind)


def changed(events: list[Event], kind: type[Event], **changes: object) -> list[Event]:
    """Return the events with the last one of a kind changed."""
    place = last_call(events, kind)
    event = msgspec.structs.replace(events[place], **changes)
    return [*events[:place], event, *events[place + 1 :]]


def without(events: list[Event], kind: type[Event]) -> list[Event]:
    place = last_call(events, kind)
    return events[:place] + events[place + 1 :]


def twice(events: list[Event], kind: type[Event]) -> list[Event]:
    place = last_call(events, kind)
    return [*events[: place + 1], *events[place:]]


def with_tokens(events: list[Event], tokens: Callable[[Tokens], Tokens]) -> list[Event]:
    """Return the events with the first tokens of the first call changed."""
    place = next(place for place, event in enumerate(events) if type(event) is Tokens)
    event = events[place]
    assert isinstance(event, Tokens)
    return [*events[:place], tokens(event), *events[place + 1 :]]


def repeated(event: Tokens) -> Tokens:
    return msgspec.structs.replace(event, token_ids=event.token_ids * 2, text=event.text * 2)


def other(event: Tokens) -> Tokens:
    return msgspec.structs.replace(
        event, token_ids=tuple(one + 1000 for one in event.token_ids), text="x" + event.text
    )


def emptied(event: Tokens) -> Tokens:
    return msgspec.structs.replace(event, token_ids=(), text="")


def failed(events: list[Event], at_s: float, *, is_accepted: bool) -> list[Event]:
    """Return the events with one more call, which fails."""
    call = CallSent(at_s=at_s, call="failed", spec="spec-0", frontend="grpc", tenant="ann")
    accepted = [CallAccepted(at_s=at_s, call="failed")] if is_accepted else []
    ended = CallEnded(at_s=at_s, call="failed", status="UNAVAILABLE")
    return [*events, call, *accepted, ended]


def stalled(events: list[Event], *, is_ready: bool = True, lag_s: float = 0.0) -> list[Event]:
    """Return the events with one more call, which gets nothing for a long time."""
    begin_s = max(event.at_s for event in events) + 1.0
    end_s = begin_s + STANDSTILL_S + 1.0
    call = CallSent(
        at_s=begin_s, call="still", spec="spec-0", frontend="grpc", tenant="ann",
        is_to_be_aborted=True,
    )  # fmt: skip
    return [
        *events,
        Readiness(at_s=begin_s, state="ready" if is_ready else "not_ready"),
        call,
        CallAccepted(at_s=begin_s, call="still"),
        *([ClientLag(at_s=end_s - 1.0, seconds=lag_s)] if lag_s else []),
        CallEnded(at_s=end_s, call="still", status="cancelled"),
    ]


DEFECTS: dict[str, tuple[Callable[[list[Event]], list[Event]], set[str]]] = {
    "a call has no end": (lambda events: without(events, CallEnded), {"never ended"}),
    "a call ends twice": (lambda events: twice(events, CallEnded), {"after its end"}),
    "a call is sent twice": (lambda events: twice(events, CallSent), {"sent twice"}),
    "a call is accepted twice": (lambda events: twice(events, CallAccepted), {"accepted twice"}),
    "a finish reason comes twice": (
        lambda events: twice(events, SequenceEnded), {"finished twice"},
    ),
    "a finish reason is missing": (lambda events: without(events, SequenceEnded), {"truncated"}),
    "the usage is missing": (
        lambda events: changed(events, CallEnded, num_generated=None), {"truncated"},
    ),
    "the usage is wrong": (
        lambda events: changed(events, CallEnded, num_generated=7), {"wrong usage"},
    ),
    "a stream ends early": (lambda events: without(events, Tokens), {"incomplete"}),
    "the finish reason is wrong": (
        lambda events: changed(events, SequenceEnded, reason="stop"), {"wrong finish reason"},
    ),
    "the server aborts": (
        lambda events: changed(events, SequenceEnded, reason="aborted"), {"wrong finish reason"},
    ),
    "tokens come twice": (lambda events: with_tokens(events, repeated), {"repeated"}),
    "tokens are left out": (lambda events: with_tokens(events, emptied), {"left out"}),
    "the index of tokens is wrong": (
        lambda events: changed(events, Tokens, begin=77), {"the history has a hole"},
    ),
    "tokens are wrong": (lambda events: with_tokens(events, other), {"different"}),
    "a call is cut without a fault that allows it": (
        lambda events: failed(events, FAULT_S + 1.0, is_accepted=True), {"lost"},
    ),
    "a call is refused without a fault": (
        lambda events: failed(events, HEALED_S + 5.0, is_accepted=False),
        {"refused without a reason"},
    ),
    "a call is cancelled without a cause": (
        lambda events: changed(events, CallEnded, status="cancelled"),
        {"cancelled without a cause"},
    ),
    "a fault does not heal": (lambda events: without(events, FaultHealed), {"never healed"}),
    "a fault heals late": (
        lambda events: changed(events, FaultHealed, at_s=FAULT_S + 61.0), {"healed late"},
    ),
    "a fault meets no stream": (
        lambda events: changed(events, FaultInjected, at_s=500.0), {"fault without open streams"},
    ),
    "nothing moves": (stalled, {"ready while nothing moves"}),
    "blocks are not free": (
        lambda events: [*events, held("after", num_free_blocks=63)], {"not given back"},
    ),
    "a call is kept": (lambda events: [*events, held("after", num_calls=1)], {"not given back"}),
    "processes are kept": (
        lambda events: [*events, held("after", num_processes=12)], {"not given back"},
    ),
    "descriptors are kept": (
        lambda events: [*events, held("after", num_descriptors=190)], {"not given back"},
    ),
    "shared memory is kept": (
        lambda events: [*events, held("after", num_shared_memory=4)], {"not given back"},
    ),
    "a process survives the server": (
        lambda events: changed(events, Leftovers, processes=("12 ray::GpuWorker",)),
        {"left behind"},
    ),
    "a segment survives the server": (
        lambda events: changed(events, Leftovers, shared_memory=("/dev/shm/a",)), {"left behind"},
    ),
    "the log has a traceback": (
        lambda events: changed(events, Leftovers, num_tracebacks=1), {"tracebacks in the log"},
    ),
    "the run is cut": (lambda events: without(events, RunEnded), {"the run did not end"}),
}  # fmt: skip


def rules(verdict: Verdict) -> set[str]:
    return set(verdict.rules)


@settings(max_examples=50)
@given(histories())
def test_a_right_history_breaks_no_rule(events: list[Event]) -> None:
    verdict = check(events)
    assert not verdict.violations
    assert verdict.figures["faults"] == 1


@pytest.mark.parametrize("defect", DEFECTS)
@settings(max_examples=15)
@given(events=histories())
def test_every_planted_defect_is_found(defect: str, events: list[Event]) -> None:
    plant, expected = DEFECTS[defect]
    assert expected <= rules(check(plant(events)))


@settings(max_examples=15)
@given(events=histories())
def test_what_a_fault_explains_is_excused(events: list[Event]) -> None:
    # A refusal while the server heals, and a loss if the fault may end streams.
    assert not check(failed(events, FAULT_S + 1.0, is_accepted=False)).violations
    allowed = changed(events, FaultInjected, may_end_streams=True)
    assert not check(failed(allowed, FAULT_S + 1.0, is_accepted=True)).violations


@settings(max_examples=15)
@given(events=histories())
def test_a_stand_still_that_the_server_reports_is_excused(events: list[Event]) -> None:
    assert not check(stalled(events, is_ready=False)).violations
    assert not check(stalled(events, lag_s=STANDSTILL_S)).violations


def test_pauses_are_attributed_to_the_fault_in_which_they_fall() -> None:
    spec = reference("spec", [[1, 2, 3]])
    tokens = (
        Tokens(at_s=at_s, until_s=at_s + 0.1, call="a", sequence=0, begin=one - 1, token_ids=(one,))
        for at_s, one in ((1.0, 1), (4.1, 2), (9.2, 3))
    )
    verdict = check(
        [
            spec,
            CallSent(at_s=0.5, call="a", spec="spec", frontend="grpc", tenant="ann"),
            CallAccepted(at_s=1.0, call="a"),
            FaultInjected(
                at_s=1.5,
                number=1,
                faults=("a", "b"),
                may_end_streams=False,
                limit_s=9.0,
                pause_limit_s=2.9,
            ),
            FaultHealed(at_s=2.0, number=1),
            *tokens,
        ]
    )
    by_fault = verdict.figures["by_fault"]
    assert isinstance(by_fault, dict)
    assert by_fault["a + b"]["longest_pause_s"] == 3.0
    assert verdict.figures["longest_pause_without_fault_s"] == 5.0
    assert "paused too long" in rules(verdict)
