"""What one sequence's grammar does is that sequence's alone: the others get their masks."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from cluster.structured.processes.follower import Follower
from cluster.structured.processes.frames import read_frame, write_frame
from cluster.structured.processes.mask_maker import MaskMaker
from cluster.structured.processes.mask_messages import Ask, AskMasks, Follow, Load, Loaded, Masks
from cluster.structured.processes.mask_step import MaskStep
from cluster.structured.processes.tenant_accounts import CpuAccount
from pagedray.errors import OverloadedError
from pagedray.request import FinishReason, Request, SamplingParams
from tests.fakes import wait_for
from tests.structured.processes.fake_masks import FakeMasks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from cluster.structured.processes.mask_maker import CompiledGrammar

REQUEST = Request(
    id="r", prompt_token_ids=(7,), sampling=SamplingParams(), seed=0, eos_token_ids=(0,)
)


class Batch:
    """Sequences that follow fake grammars, asked for together."""

    def __init__(self, memory_bytes: int = 2**30, **options: Any) -> None:  # Any: its options
        self.fake = FakeMasks(memory_bytes=memory_bytes)
        options = {"most_tenant_bytes": memory_bytes, **options}
        self.maker = MaskMaker(self.fake.connect, num_mask_bytes=4, **options)
        self.matchers: list[Any] = []

    def add(self, *texts: str, tenant: str = "") -> list[CompiledGrammar]:
        grammars = [self.maker.grammar(text.encode(), tenant=tenant)[0] for text in texts]
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


@pytest.mark.parametrize("kind", ["eats", "holds the lock"])
def test_what_follows_a_grammar_that_costs_a_process_costs_no_other(kind: str) -> None:
    batch = Batch(memory_bytes=256 * 2**20, step_s=0.5, alone_s=0.5)
    batch.add("plain")
    (fatal,) = batch.add(kind)
    batch.matchers += [fatal.matcher(REQUEST) for _ in range(5)]
    batch.add("plain")
    assert batch.masks(3) == [4, *[FinishReason.ERROR] * 6, 4]
    # That of all, that of the first to follow it, and the one that goes on.
    assert len(batch.fake.processes) == 3
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


@pytest.mark.parametrize("num_mib", [30, 60])
def test_a_text_for_which_there_is_no_memory_is_refused_and_ends_nothing(num_mib: int) -> None:
    batch = Batch(memory_bytes=128 * 2**20)
    batch.add(*[f"plain of {40 * 2**20}"] * 2)
    # Of 48 MiB that are left, one is received but not read, and the other is not received.
    with pytest.raises(OverloadedError, match="in use take all the memory"):
        batch.add("plain of 1" + " " * (num_mib * 2**20))
    batch.add("plain")
    assert batch.masks(1) == [2, 2, 2]
    assert len(batch.fake.processes) == 1
    batch.close()


def fill(batch: Batch) -> None:
    """Add grammars until one is refused."""
    while True:
        batch.add(f"plain of {4 * 2**20}")


def test_threads_need_no_memory_that_grammars_may_have_taken() -> None:
    batch = Batch(memory_bytes=64 * 2**20)
    batch.add(*["plain"] * 9)
    # What is left is too little for the stack of a thread, of 8 MiB.
    with pytest.raises(OverloadedError):
        fill(batch)
    assert set(batch.masks(1)) == {2}
    assert len(batch.fake.processes) == 1
    batch.close()


def test_no_tenant_takes_the_memory_of_the_others() -> None:
    batch = Batch(most_tenant_bytes=100)
    batch.add("plain of 50", "plain of 50", tenant="ann")
    with pytest.raises(OverloadedError, match="at most 0 MiB are allowed"):
        batch.add("plain of 1", tenant="ann")
    batch.add("plain of 100", tenant="ben")
    del batch.matchers[0]
    batch.add("plain of 50", tenant="ann")
    batch.close()


class Told:
    """Processes that the test itself plays, one for each pair of sockets."""

    def __init__(self) -> None:
        self.masks: list[socket.socket] = []
        self.grammars: list[socket.socket] = []

    def connect(self) -> tuple[socket.socket, socket.socket]:
        (masks, their_masks), (grammars, their_grammars) = socket.socketpair(), socket.socketpair()
        self.grammars.append(their_grammars)
        self.masks.append(their_masks)
        return masks, grammars

    def load(self, process: int) -> None:
        """Take a grammar."""
        wait_for(lambda: len(self.masks) > process)
        msgspec.msgpack.decode(read_frame(self.grammars[process]), type=Load)
        write_frame(self.grammars[process], msgspec.msgpack.encode(Loaded(0)))

    def asked(self, process: int) -> AskMasks:
        """Return the next question."""
        return msgspec.msgpack.decode(read_frame(self.masks[process]), type=AskMasks)

    def answer(self, process: int, spent_s: float) -> None:
        """Answer a question for one mask."""
        answer = Masks({}, [], b"mask", [], [], [spent_s])
        write_frame(self.masks[process], msgspec.msgpack.encode(answer))

    def close(self) -> None:
        for connection in (*self.masks, *self.grammars):
            connection.close()


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    yield told
    told.close()


def test_who_compiles_when_a_process_ends_loses_no_mask(told: Told) -> None:
    maker = MaskMaker(told.connect, num_mask_bytes=4, most_tenant_bytes=1)
    with ThreadPoolExecutor(2) as threads:
        loading = threads.submit(maker.grammar, b"")
        told.load(0)
        grammar, _ = loading.result()
        asking = threads.submit(maker.masks, [(grammar.matcher(REQUEST), (7,))])
        told.asked(0)
        # It is over, but for what it says last.
        told.grammars[0].close()
        other = threads.submit(maker.grammar, b"")
        told.load(1)
        other.result()
        told.answer(0, 0.0)
        assert asking.result() == [b"mask"]
    maker.close()


def test_no_tenant_takes_the_time_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    batch = Batch()
    # A grammar each, as a comment makes it.
    batch.add(*["takes 50 ms", "plain"] * 20, tenant="ann")
    batch.add(*["plain"] * 4, tenant="ben")
    assert batch.masks(1) == [2] * 44
    outcomes = batch.masks(1, 3)
    slow, quick, others = outcomes[0:40:2], outcomes[1:40:2], outcomes[40:]
    assert others == [4] * 4
    # Half a second, and 3 ms for each of 40 rows, at 50 ms a mask.
    assert FinishReason.ERROR in slow
    assert 9 <= slow.count(4) <= 13
    assert set(slow) | set(quick) <= {4, FinishReason.ERROR}
    assert "A sequence is ended: the masks of its tenant took too long together." in caplog.messages
    assert len(batch.fake.processes) == 1
    batch.close()


def test_what_costs_most_is_what_a_tenant_has_no_time_left_for() -> None:
    batch = Batch()
    batch.add(*["takes 50 ms", "plain"] * 20, tenant="ann")
    # The first slow masks show who is slow, and there is time for them.
    slow = batch.matchers[:20:2]
    batch.matchers = slow + batch.matchers[1::2]
    assert batch.masks(3) == [4] * 30
    outcomes = batch.masks(3, 4)
    assert outcomes[10:] == [5] * 20
    assert FinishReason.ERROR in outcomes[:10]
    batch.close()


def test_what_is_told_again_may_take_what_it_took_and_little_more(told: Told) -> None:
    maker = MaskMaker(told.connect, num_mask_bytes=4, most_tenant_bytes=1, step_s=5.0, alone_s=2.0)
    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(maker.grammar, b"")
        told.load(0)
        grammar, _ = loading.result()
        matcher = grammar.matcher(REQUEST)
        asking = threads.submit(maker.masks, [(matcher, [7] * 1001)])
        told.asked(0)
        told.answer(0, 0.75)
        asking.result()
        asking = threads.submit(maker.masks, [(matcher, [7] * 1101)])
        (ask,) = (question := told.asked(0)).asks
        # 10 ms a token, of which there are 100.
        assert ask.follow is None
        assert question.limit_s == pytest.approx(5.0 + 0.1 + 1.0)
        told.masks[0].close()
        told.load(1)
        (ask,) = (question := told.asked(1)).asks
        assert ask.follow is not None
        assert ask.follow.spent_s == 0.75
        # 0.1 ms a token, of which there are 1100.
        assert question.limit_s == pytest.approx(2.0 + 0.1 + 0.75 + 0.11)
        told.answer(1, 0.75)
        assert asking.result() == [b"mask"]
    maker.close()


class QuickWalk:
    """Allows everything at once."""

    is_complete = False

    def take(self, token_id: int) -> bool:
        return True

    def write_mask(self, masks: NDArray[np.int32], row: int) -> None:
        masks[row] = -1


def test_what_is_told_again_is_not_paid_for_twice() -> None:
    walk: Any = QuickWalk()  # Any: it stands for the library's
    account = CpuAccount(0.0)
    # 100 tokens allow 1.5 s.
    follower = Follower(walk, Follow(0, 0, False, (), (), spent_s=1.4), 32, lambda: account)
    masks = np.zeros((1, 1), np.int32)
    assert follower.write_mask([1] * 100, masks, 0) is None
    assert follower.spent_s == 1.4
    assert follower.write_mask([1], masks, 0) is None
    assert 1.4 < follower.spent_s < 1.5


class SleepingFollower:
    """Waits for the end of the test, without computing."""

    complaint = ""
    spent_s = 0.0

    def __init__(self, end: threading.Event | None) -> None:
        self._end = end

    def write_mask(self, token_ids: Sequence[int], masks: object, row: int) -> None:
        if self._end is not None:
            self._end.wait(60.0)


RETOLD = Follow(0, 0, False, (), ())


@pytest.mark.parametrize("slow", [Ask(1, [1]), Ask(1, [1] * 600, RETOLD)])
def test_a_mask_that_only_sleeps_is_not_waited_for_either(slow: Ask) -> None:
    end = threading.Event()
    asks = [Ask(0, [1]), slow, Ask(2, [1])]
    # Any: it stands for a follower.
    follower_of: Any = lambda ask: SleepingFollower(end if ask.sequence_id == 1 else None)  # noqa: E731
    step = MaskStep(asks, np.zeros((3, 1), np.int32), follower_of, lambda _: 0.0)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(step.run, threads, 1)
        wait_for(lambda: 1 in step._turns)
        answers: list[Masks | None] = []
        while len(answers) < 2000 and (not answers or answers[-1] is None):
            # Lets it fall asleep.
            time.sleep(0.001)
            answers.append(step.look())
        end.set()
    found = [index for index, answer in enumerate(answers) if answer is not None]
    # Three seconds, of which each look stands for a twentieth; it falls asleep behind the first.
    assert found[0] >= 60
    answer = answers[found[0]]
    assert answer is not None
    assert (answer.ends, answer.culprits, answer.unmade) == ({1: FinishReason.ERROR}, [1], [2])
    assert running.result().culprits == []


class ComputingFollower:
    """Computes for a while, without Python's lock."""

    complaint = ""
    spent_s = 0.0

    def write_mask(self, token_ids: Sequence[int], masks: object, row: int) -> None:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)


def test_a_mask_that_waits_for_a_processor_is_not_to_blame() -> None:
    # Any: it stands for a follower.
    follower_of: Any = lambda ask: ComputingFollower()  # noqa: E731
    # Ten seconds may be computed and sixty be slept.
    step = MaskStep([Ask(1, [1] * 1000)], np.zeros((1, 1), np.int32), follower_of, lambda _: 0.0)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(step.run, threads, 1)
        wait_for(lambda: 0 in step._turns)
        assert [step.look() for _ in range(2000)] == [None] * 2000
    assert running.result().culprits == []
