"""A grammar that fails affects its own sequences only: the others get their masks."""

from __future__ import annotations

import math
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from cluster.structured.child_process import read_frame, write_frame
from cluster.structured.mask_client import (
    CompiledGrammar,
    MaskClient,
)
from cluster.structured.messages import (
    GrammarLoaded,
    GrammarText,
    LoadFailed,
    LoadGrammar,
    MadeMask,
    MaskQuery,
    MaskReply,
    MatcherStart,
    StepQuery,
)
from cluster.structured.sequence_matcher import SequenceMatcher, allowed_cpu_s
from pagedray.errors import EngineError, InvalidRequestError, OverloadedError
from pagedray.request import AskedMasks, FinishReason, Request
from pagedray.sampling_params import SamplingParams
from tests.fakes import wait_for
from tests.slow_params import some_slow
from tests.structured.fake_masks import FakeMasks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

REQUEST = Request(
    id="r", prompt_token_ids=(7,), sampling=SamplingParams(), seed=0, eos_token_ids=(0,)
)


# Any: matchers.
def waited_for(client: MaskClient, asked: Sequence[tuple[Any, Sequence[int]]]) -> Sequence[Any]:
    """Return the outcomes, however long they take."""
    return client.masks(
        [AskedMasks(*one) for one in asked], num_awaited=len(asked), wait_s=math.inf
    )


class Batch:
    """Sequences that follow fake grammars, queried together."""

    def __init__(
        self,
        memory_bytes: int = 2**30,
        *,
        max_tenant_bytes: int | None = None,
        hang_s: float = 5.0,
    ) -> None:
        self.fake = FakeMasks(memory_bytes=memory_bytes, keeps_priority=True, hang_s=hang_s)
        self.client = MaskClient(
            self.fake.connect, num_mask_bytes=4, max_tenant_bytes=max_tenant_bytes or memory_bytes
        )
        self.matchers: list[Any] = []

    def add(self, *texts: str, tenant: str = "") -> list[CompiledGrammar]:
        grammars = [
            self.client.load_grammar(GrammarText(text.encode()), tenant=tenant)[0] for text in texts
        ]
        self.matchers += [grammar.matcher(REQUEST) for grammar in grammars]
        return grammars

    def masks(self, *token_ids: int) -> Sequence[object]:
        """Return which token may follow each sequence's tokens."""
        asked = [(matcher, (7, *token_ids)) for matcher in self.matchers]
        return [
            one if isinstance(one, FinishReason) else int.from_bytes(one, "little").bit_length() - 1
            for one in waited_for(self.client, asked)
        ]

    def close(self) -> None:
        self.client.close()
        for process in self.fake.processes:
            process.wait(60.0)


@pytest.fixture
def batch() -> Iterator[Batch]:
    batch = Batch()
    yield batch
    batch.close()


@pytest.mark.parametrize("num_others", some_slow([9, 1], slow=[1]))
def test_a_mask_that_never_ends_ends_its_sequence_and_no_other(
    batch: Batch, num_others: int, caplog: pytest.LogCaptureFixture
) -> None:
    batch.add("spins", *["plain"] * num_others)
    assert batch.masks(1, 2) == [3] * (num_others + 1)
    # With one thread or two, before and after the one that hangs.
    assert batch.masks(1, 2, 3) == [FinishReason.ERROR, *[4] * num_others]
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("Ending a sequence with an error: its mask took ")
    errors = [matcher.error for matcher in batch.matchers]
    assert f"Ending a sequence with an error: {errors[0]}." == caplog.messages[0]
    assert errors[1:] == [""] * num_others
    # Its process ends with it, and the next one continues from there.
    assert batch.fake.processes[0].wait(60.0) == 0
    del batch.matchers[0]
    assert batch.masks(1, 2, 3, 4) == [5] * num_others
    assert len(batch.fake.processes) == 2


def test_all_sequences_of_a_slow_grammar_end(batch: Batch) -> None:
    (slow,) = batch.add("spins")
    batch.matchers += [slow.matcher(REQUEST) for _ in range(2)]
    batch.add("plain")
    assert batch.masks(3) == [*[FinishReason.ERROR] * 3, 4]
    assert [bool(matcher.error) for matcher in batch.matchers] == [*[True] * 3, False]
    assert len(batch.fake.processes) <= 2


@pytest.mark.slow
def test_the_kernel_kills_a_process_that_cannot_be_watched() -> None:
    batch = Batch(hang_s=1.5)
    batch.add("plain", "holds the lock", "plain")
    assert batch.masks(3) == [4, FinishReason.ERROR, 4]
    errors = [matcher.error for matcher in batch.matchers]
    assert errors == ["", "its masks take too much time or memory", ""]
    # The one of all sequences, and the one of the offender alone.
    assert [one.wait(60.0) for one in batch.fake.processes[:2]] == [-14, -14]
    batch.close()


@pytest.mark.parametrize("kind", some_slow(["eats", "holds the lock"], slow=["eats"]))
def test_a_grammar_that_ends_a_process_ends_it_once(kind: str) -> None:
    batch = Batch(memory_bytes=256 * 2**20, hang_s=1.5)
    batch.add("plain")
    (crashing,) = batch.add(kind)
    batch.matchers += [crashing.matcher(REQUEST) for _ in range(5)]
    batch.add("plain")
    assert batch.masks(3) == [4, *[FinishReason.ERROR] * 6, 4]
    # The one of all sequences, the one of its first sequence, and the one of the others.
    assert len(batch.fake.processes) == 3
    batch.close()


def test_a_sequence_that_takes_all_memory_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    batch = Batch(memory_bytes=256 * 2**20)
    batch.add("plain", "eats", "plain")
    assert batch.masks(1) == [2, 2, 2]
    assert batch.masks(1, 3) == [4, FinishReason.ERROR, 4]
    assert "Ending a sequence with an error: its mask ran out of memory." in (caplog.messages)
    assert len(batch.fake.processes) == 3
    batch.close()


@pytest.mark.slow
def test_a_grammar_that_does_not_fit_in_memory_is_rejected() -> None:
    batch = Batch(memory_bytes=256 * 2**20)
    batch.add("plain")
    with pytest.raises(OverloadedError, match="in use take all memory"):
        batch.add(f"plain of {400 * 2**20}")
    # It fits when another is no longer used.
    batch.add(f"plain of {150 * 2**20}")
    with pytest.raises(OverloadedError):
        batch.add(f"plain of {151 * 2**20}")
    batch.matchers.pop()
    batch.add(f"plain of {152 * 2**20}")
    assert batch.masks(1) == [2, 2]
    assert len(batch.fake.processes) == 1
    batch.close()


@pytest.mark.parametrize("num_mib", [30, 60])
def test_a_text_that_does_not_fit_in_memory_is_rejected_and_ends_nothing(num_mib: int) -> None:
    batch = Batch(memory_bytes=128 * 2**20)
    batch.add(*[f"plain of {40 * 2**20}"] * 2)
    # With 48 MiB left, one text is received but not parsed, and the other is not received.
    with pytest.raises(OverloadedError, match="in use take all memory"):
        batch.add("plain of 1" + " " * (num_mib * 2**20))
    batch.add("plain")
    assert batch.masks(1) == [2, 2, 2]
    assert len(batch.fake.processes) == 1
    batch.close()


def fill(batch: Batch) -> None:
    """Add grammars until one is rejected."""
    while True:
        batch.add(f"plain of {4 * 2**20}")


def test_threads_run_when_grammars_have_taken_all_memory() -> None:
    batch = Batch(memory_bytes=64 * 2**20)
    batch.add(*["plain"] * 9)
    # Too little is left for the stack of a thread, which has 8 MiB.
    with pytest.raises(OverloadedError):
        fill(batch)
    assert set(batch.masks(1)) == {2}
    assert len(batch.fake.processes) == 1
    batch.close()


def test_no_tenant_takes_the_memory_of_the_others() -> None:
    batch = Batch(max_tenant_bytes=100)
    batch.add("plain of 50", "plain of 50", tenant="ann")
    with pytest.raises(OverloadedError, match="at most 0 MiB are allowed"):
        batch.add("plain of 1", tenant="ann")
    batch.add("plain of 100", tenant="ben")
    del batch.matchers[0]
    batch.add("plain of 50", tenant="ann")
    batch.close()


def test_grammar_that_never_fits_is_no_matter_of_load() -> None:
    batch = Batch(max_tenant_bytes=2**20)
    batch.add(f"plain of {2**20}", tenant="ann")
    with pytest.raises(InvalidRequestError, match=r"takes 2 MiB .* at most 1 MiB"):
        batch.add(f"plain of {2**21}", tenant="ben")
    batch.close()


class ScriptedProcesses:
    """Processes played by the test, one for each pair of sockets."""

    def __init__(self) -> None:
        self.masks: list[socket.socket] = []
        self.grammars: list[socket.socket] = []

    def connect(self) -> tuple[socket.socket, socket.socket]:
        (masks, their_masks), (grammars, their_grammars) = socket.socketpair(), socket.socketpair()
        self.grammars.append(their_grammars)
        self.masks.append(their_masks)
        return masks, grammars

    def load(self, process: int, *, failure: LoadFailed | None = None) -> None:
        """Load a grammar, or fail to do so."""
        wait_for(lambda: len(self.masks) > process)
        msgspec.msgpack.decode(read_frame(self.grammars[process]), type=LoadGrammar)
        reply = failure or GrammarLoaded(0)
        write_frame(self.grammars[process], msgspec.msgpack.encode(reply))

    def asked(self, process: int) -> StepQuery:
        """Return the next query."""
        return msgspec.msgpack.decode(read_frame(self.masks[process]), type=StepQuery)

    def answer(self, process: int, query: MaskQuery, cpu_s: float) -> None:
        """Answer a query of one mask."""
        reply = MaskReply([MadeMask(query.sequence_id, cpu_s, 0.0, b"mask")])
        write_frame(self.masks[process], msgspec.msgpack.encode(reply))

    def close(self) -> None:
        for connection in (*self.masks, *self.grammars):
            connection.close()


@pytest.fixture
def scripted() -> Iterator[ScriptedProcesses]:
    scripted = ScriptedProcesses()
    yield scripted
    scripted.close()


def test_a_process_that_dies_while_a_grammar_loads_loses_no_mask(
    scripted: ScriptedProcesses,
) -> None:
    client = MaskClient(scripted.connect, num_mask_bytes=4, max_tenant_bytes=1)
    with ThreadPoolExecutor(2) as threads:
        loading = threads.submit(client.load_grammar, GrammarText(b""))
        scripted.load(0)
        grammar, _ = loading.result()
        asking = threads.submit(waited_for, client, [(grammar.matcher(REQUEST), (7,))])
        (query,) = scripted.asked(0).queries
        # It has died, but its last reply is still to be read.
        scripted.grammars[0].close()
        other = threads.submit(client.load_grammar, GrammarText(b""))
        scripted.load(1)
        other.result()
        scripted.answer(0, query, 0.0)
        assert asking.result() == [b"mask"]
    client.close()


def test_a_grammar_that_cannot_be_loaded_fails_alone(scripted: ScriptedProcesses) -> None:
    client = MaskClient(scripted.connect, num_mask_bytes=4, max_tenant_bytes=1)
    with ThreadPoolExecutor(1) as threads:
        failing = threads.submit(client.load_grammar, GrammarText(b"{}"))
        scripted.load(0, failure=LoadFailed("unknown version", is_out_of_memory=False))
        with pytest.raises(EngineError, match=r"^Failed to load .* grammar: unknown version\.$"):
            failing.result()
        loading = threads.submit(client.load_grammar, GrammarText(b""))
        scripted.load(0)
        loading.result()
    assert len(scripted.masks) == 1
    client.close()


@pytest.mark.parametrize("reply", [b"\xff", b"\x96" + b"\x91" * 5000], ids=["garbage", "nested"])
def test_a_process_that_replies_with_no_message_is_replaced(
    scripted: ScriptedProcesses, reply: bytes
) -> None:
    client = MaskClient(scripted.connect, num_mask_bytes=4, max_tenant_bytes=1)
    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(client.load_grammar, GrammarText(b""))
        scripted.load(0)
        grammar, _ = loading.result()
        asking = threads.submit(waited_for, client, [(grammar.matcher(REQUEST), (7,))])
        scripted.asked(0)
        write_frame(scripted.masks[0], reply)
        scripted.load(1)
        (query,) = scripted.asked(1).queries
        scripted.answer(1, query, 0.0)
        assert asking.result() == [b"mask"]
    client.close()


def test_a_replay_may_take_what_the_tokens_took_and_little_more(
    scripted: ScriptedProcesses,
) -> None:
    client = MaskClient(scripted.connect, num_mask_bytes=4, max_tenant_bytes=1)
    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(client.load_grammar, GrammarText(b""))
        scripted.load(0)
        grammar, _ = loading.result()
        matcher = grammar.matcher(REQUEST)
        asking = threads.submit(waited_for, client, [(matcher, [7] * 1001)])
        (query,) = scripted.asked(0).queries
        scripted.answer(0, query, 0.75)
        asking.result()
        asking = threads.submit(waited_for, client, [(matcher, [7] * 1101)])
        (query,) = scripted.asked(0).queries
        assert query.start is None
        # 10 ms a token, of which there are 100.
        assert allowed_cpu_s(query) == pytest.approx(1.0)
        scripted.masks[0].close()
        scripted.load(1)
        (query,) = scripted.asked(1).queries
        assert query.start is not None
        assert query.start.cpu_s == 0.75
        # 0.1 ms a token, of which there are 1100.
        assert allowed_cpu_s(query) == pytest.approx(0.75 + 0.11)
        scripted.answer(1, query, 0.75)
        assert asking.result() == [b"mask"]
    client.close()


def test_errors_of_the_socket_are_described_in_words() -> None:
    def connect() -> tuple[socket.socket, socket.socket]:
        """Return sockets of a process that has died."""
        pairs = socket.socketpair(), socket.socketpair()
        for _, theirs in pairs:
            theirs.close()
        return pairs[0][0], pairs[1][0]

    client = MaskClient(connect, num_mask_bytes=4, max_tenant_bytes=100)
    with pytest.raises(EngineError, match=r"The mask process died: Broken pipe\.$"):
        client.load_grammar(GrammarText(b"{}"))
    client.close()


class QuickMatcher:
    """Allows all tokens, immediately."""

    is_complete = False
    is_free = False

    def accept_token(self, token_id: int) -> bool:
        return True

    def write_mask(self, masks: NDArray[np.int32], row: int) -> None:
        masks[row] = -1


def test_a_replay_is_not_charged_twice() -> None:
    fast: Any = QuickMatcher()  # Any: a fake
    # 100 tokens allow 1.5 s.
    matcher = SequenceMatcher(fast, MatcherStart(0, 0, False, (), (), cpu_s=1.4), 32)
    masks = np.zeros((1, 1), np.int32)
    assert matcher.write_mask([1] * 100, masks, 0) is None
    assert matcher.cpu_s == 1.4
    assert matcher.write_mask([1], masks, 0) is None
    assert 1.4 < matcher.cpu_s < 1.5


def test_no_token_ends_a_sequence_before_min_tokens() -> None:
    free: Any = QuickMatcher()  # Any: a fake
    start = MatcherStart(0, 2, False, eos_token_ids=(0,), stop_token_ids=(3,))
    matcher = SequenceMatcher(free, start, 32)
    forbidden = []
    for token_ids in ([], [1], [1]):
        masks = np.zeros((1, 1), np.int32)
        assert matcher.write_mask(token_ids, masks, 0) is None
        forbidden.append([token for token in range(32) if not masks[0, 0] >> token & 1])
    assert forbidden == [[0, 3], [0, 3], []]
