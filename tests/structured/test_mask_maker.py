"""What one sequence's grammar does is that sequence's alone: the others get their masks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cluster.structured.mask_maker import MaskMaker
from cluster.structured.mask_messages import Ask
from cluster.structured.mask_step import MaskStep
from pagedray.errors import OverloadedError
from pagedray.request import FinishReason, Request, SamplingParams
from tests.fakes import wait_for
from tests.structured.fake_masks import FakeMasks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cluster.structured.mask_maker import CompiledGrammar

REQUEST = Request(
    id="r", prompt_token_ids=(7,), sampling=SamplingParams(), seed=0, eos_token_ids=(0,)
)


class Batch:
    """Sequences that follow fake grammars, asked for together."""

    def __init__(self, memory_bytes: int = 2**30, **options: Any) -> None:  # Any: its options
        self.fake = FakeMasks(memory_bytes=memory_bytes)
        self.maker = MaskMaker(self.fake.connect, num_mask_bytes=4, **options)
        self.matchers: list[Any] = []

    def add(self, *texts: str) -> list[CompiledGrammar]:
        grammars = [self.maker.grammar(text.encode())[0] for text in texts]
        self.matchers += [grammar.matcher(REQUEST) for grammar in grammars]
        return grammars

    def masks(self, *token_ids: int) -> Sequence[object]:
        """Return which token may follow each sequence's tokens."""
        asked = [(matcher, (7, *token_ids)) for matcher in self.matchers]
        return [
            one if isinstance(one, FinishReason) else int.from_bytes(one, "little").bit_length() - 1
            for one in self.maker.masks(asked)
        ]

    def close(self) -> None:
        self.maker.close()
        for process in self.fake.processes:
            process.wait(10.0)


@pytest.fixture
def batch() -> Iterator[Batch]:
    batch = Batch()
    yield batch
    batch.close()


@pytest.mark.parametrize("num_others", [1, 9])
def test_a_mask_that_takes_for_ever_ends_its_sequence_and_no_other(
    batch: Batch, num_others: int, caplog: pytest.LogCaptureFixture
) -> None:
    batch.add("spins", *["plain"] * num_others)
    assert batch.masks(1, 2) == [3] * (num_others + 1)
    # With one thread or two, before and behind the one that hangs.
    assert batch.masks(1, 2, 3) == [FinishReason.ERROR, *[4] * num_others]
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("A sequence is ended: its mask, for which others wait, to")
    # Its process ends with it, and the next one goes on where that was.
    assert batch.fake.processes[0].wait(10.0) == 0
    del batch.matchers[0]
    assert batch.masks(1, 2, 3, 4) == [5] * num_others
    assert len(batch.fake.processes) == 2


def test_what_follows_a_slow_grammar_ends_with_it(batch: Batch) -> None:
    (slow,) = batch.add("spins")
    batch.matchers += [slow.matcher(REQUEST) for _ in range(20)]
    batch.add("plain")
    assert batch.masks(3) == [*[FinishReason.ERROR] * 21, 4]
    assert len(batch.fake.processes) == 2


def test_what_lets_nobody_look_on_is_ended_by_the_kernel() -> None:
    batch = Batch(step_s=0.3, alone_s=0.2)
    batch.add("plain", "holds the lock", "plain")
    assert batch.masks(3) == [4, FinishReason.ERROR, 4]
    # That of all, and that of the culprit alone.
    assert [one.wait(10.0) for one in batch.fake.processes[:2]] == [-14, -14]
    batch.close()


def test_who_takes_all_memory_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    batch = Batch(memory_bytes=256 * 2**20)
    batch.add("plain", "eats", "plain")
    assert batch.masks(1) == [2, 2, 2]
    assert batch.masks(1, 3) == [4, FinishReason.ERROR, 4]
    assert "A sequence is ended: its grammar takes more memory than there is for masks." in (
        caplog.messages
    )
    assert len(batch.fake.processes) == 3
    batch.close()


def test_a_grammar_for_which_there_is_no_memory_is_refused() -> None:
    batch = Batch(memory_bytes=256 * 2**20)
    batch.add("plain")
    with pytest.raises(OverloadedError, match="in use take all the memory"):
        batch.add(f"plain of {400 * 2**20}")
    # There is room when another is needed no more.
    batch.add(f"plain of {150 * 2**20}")
    with pytest.raises(OverloadedError):
        batch.add(f"plain of {151 * 2**20}")
    batch.matchers.pop()
    batch.add(f"plain of {152 * 2**20}")
    assert batch.masks(1) == [2, 2]
    assert len(batch.fake.processes) == 1
    batch.close()


class SleepingFollower:
    """Waits for the end of the test, without computing."""

    complaint = ""

    def __init__(self, end: threading.Event | None) -> None:
        self._end = end

    def write_mask(self, token_ids: Sequence[int], masks: object, row: int) -> None:
        if self._end is not None:
            self._end.wait(60.0)


def test_a_mask_that_only_sleeps_is_not_waited_for_either() -> None:
    end = threading.Event()
    asks = [Ask(0, [1]), Ask(1, [1]), Ask(2, [1])]
    # Any: it stands for a follower.
    follower_of: Any = lambda ask: SleepingFollower(end if ask.sequence_id == 1 else None)  # noqa: E731
    step = MaskStep(asks, np.zeros((3, 1), np.int32), follower_of)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(step.run, threads, 1)
        wait_for(lambda: 1 in step._turns)
        answers = [step.look() for _ in range(100)]
        end.set()
    found = [index for index, answer in enumerate(answers) if answer is not None]
    # Six times the half second that it may compute, a tenth once the step is a second old.
    assert 10 <= found[0] <= 70
    answer = answers[found[0]]
    assert answer is not None
    assert (answer.ends, answer.culprits, answer.unmade) == ({1: FinishReason.ERROR}, [1], [2])
    assert running.result().culprits == []
