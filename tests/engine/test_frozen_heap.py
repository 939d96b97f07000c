"""What is exempt from garbage collection while calls of `LLM` and `AsyncLLM` run."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING

import pytest

from cluster.engine import frozen_heap
from cluster.engine.frozen_heap import CallFreezer, freeze_heap
from pagedray import LLM, AsyncLLM, SamplingParams
from tests.system.server_process import ROOT, TINY_LLAMA

if TYPE_CHECKING:
    from collections.abc import Iterator


# Before the tests, in which it is replaced.
is_frozen = frozen_heap._is_frozen


@pytest.fixture(autouse=True)
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The objects of all tests of the process are frozen."""
    monkeypatch.setattr(frozen_heap, "_is_frozen", is_frozen)
    gc.unfreeze()
    yield
    gc.freeze()


def is_collectable(found: object) -> bool:
    return any(one is found for one in gc.get_objects())


def test_what_exists_is_exempt_until_the_end_of_the_context() -> None:
    before = [[0]]
    with freeze_heap():
        after = [[1]]
        assert (is_collectable(before), is_collectable(after)) == (False, True)
    assert (is_collectable(before), is_collectable(after)) == (True, True)


def test_what_the_caller_has_frozen_remains_so() -> None:
    before = [[0]]
    gc.freeze()
    with freeze_heap():
        pass
    assert not is_collectable(before)


def test_what_python_freezes_when_it_starts_does_not_count() -> None:
    program = """
import gc
from cluster.engine.frozen_heap import freeze_heap
before = [[0]]
with freeze_heap():
    assert not any(one is before for one in gc.get_objects())
assert any(one is before for one in gc.get_objects())
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


class Garbage:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.own = self


class CollectorClock:
    """A clock that advances by a second with each full collection."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_collections = 0

    def __call__(self) -> float:
        return self.now_s

    def note_phase(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            self.now_s += 1.0
            self.num_collections += 1


@pytest.fixture
def clock() -> Iterator[CollectorClock]:
    clock = CollectorClock()
    # Only what is requested is collected, whatever other threads allocate.
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    gc.callbacks.append(clock.note_phase)
    yield clock
    gc.callbacks.remove(clock.note_phase)
    gc.set_threshold(*thresholds)


def test_calls_collect_garbage_in_a_small_share_of_the_time(clock: CollectorClock) -> None:
    freezer = CallFreezer(clock)
    found = []
    for _ in range(1000):
        garbage = Garbage()
        found.append(weakref.ref(garbage))
        del garbage
        with freezer.freeze():
            clock.now_s += 1.0
    assert clock.num_collections == 2
    # All but what came after the last collection.
    assert sum(one() is None for one in found) > 500


def test_frozen_objects_are_counted_in_a_small_share_of_the_time(
    clock: CollectorClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_counts = 0
    count = gc.get_freeze_count

    def counted() -> int:
        nonlocal num_counts
        num_counts += 1
        clock.now_s += 1.0
        return count()

    monkeypatch.setattr(gc, "get_freeze_count", counted)
    gc.freeze()
    freezer = CallFreezer(clock)
    for _ in range(1000):
        with freezer.freeze():
            clock.now_s += 1.0
    assert num_counts == 2
    assert clock.num_collections == 0


def test_calls_exempt_what_exists_again_after_the_caller_has_unfrozen_its_objects() -> None:
    now_s = 0.0
    freezer = CallFreezer(lambda: now_s)
    gc.freeze()
    with freezer.freeze():
        pass
    gc.unfreeze()
    before = [[0]]
    with freezer.freeze():
        assert not is_collectable(before)
    assert is_collectable(before)


def test_what_exists_is_exempt_until_the_last_call_ends() -> None:
    freezer = CallFreezer()
    before = [[0]]
    first, second = freezer.freeze(), freezer.freeze()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not is_collectable(before)
    second.__exit__(None, None, None)
    assert is_collectable(before)


def test_garbage_is_left_to_a_caller_who_disabled_its_collection(clock: CollectorClock) -> None:
    freezer = CallFreezer(clock)
    gc.disable()
    try:
        for _ in range(200):
            with freezer.freeze():
                clock.now_s += 1.0
    finally:
        gc.enable()
    assert clock.num_collections == 0


def test_collections_of_a_call_do_not_traverse_its_prompts() -> None:
    prompts = [[5] * 20 for _ in range(4)]
    were_collectable: list[bool] = []

    def watch(phase: str, _: object) -> None:
        if phase == "start":
            were_collectable.append(is_collectable(prompts))

    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(TINY_LLAMA, executor="local", device="cpu", show_progress=False) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        thresholds = gc.get_threshold()
        gc.callbacks.append(watch)
        # A call of this size would not collect.
        gc.set_threshold(20)
        try:
            llm.generate(prompts, params, use_tqdm=False)
        finally:
            gc.callbacks.remove(watch)
            gc.set_threshold(*thresholds)
    # Only while the prompts are read, before anything runs.
    assert were_collectable.count(False) > were_collectable.count(True)


async def test_concurrent_calls_exempt_what_exists_until_the_last_ends() -> None:
    before = [[0]]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    options = {"executor": "local", "device": "cpu", "show_progress": False}
    async with AsyncLLM(TINY_LLAMA, **options) as llm:  # type: ignore[arg-type]  # by name
        first, second = llm.generate([5] * 4, params), llm.generate([6] * 4, params)
        await anext(first)
        await anext(second)
        await first.aclose()
        assert not is_collectable(before)
        await second.aclose()
        assert is_collectable(before)
