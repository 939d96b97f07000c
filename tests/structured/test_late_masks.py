"""Masks that take long: no step waits for them, and they do not delay others."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cluster.structured.mask_client import MaskClient
from cluster.structured.messages import GrammarText
from pagedray.request import AskedMasks, FinishReason, Request
from pagedray.sampling_params import SamplingParams
from tests.fakes import wait_for
from tests.structured.fake_masks import FakeMasks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cluster.structured.mask_client import MatcherHandle

REQUEST = Request(
    id="r", prompt_token_ids=(7,), sampling=SamplingParams(), seed=0, eos_token_ids=(0,)
)


class Client:
    """A client of fake masks."""

    def __init__(self, *, keeps_priority: bool = False) -> None:
        self.fake = FakeMasks(keeps_priority=keeps_priority)
        self._client = MaskClient(self.fake.connect, num_mask_bytes=4, max_tenant_bytes=2**30)

    def matcher(self, text: str, tenant: str = "") -> MatcherHandle:
        grammar, _ = self._client.load_grammar(GrammarText(text.encode()), tenant=tenant)
        return grammar.matcher(REQUEST)

    def masks(
        self, *asked: tuple[MatcherHandle, Sequence[int]], num_awaited: int, wait_s: float = 60.0
    ) -> list[int | FinishReason | None]:
        """Return which token may follow the tokens of each sequence."""
        given = [AskedMasks(matcher, (7, *token_ids)) for matcher, token_ids in asked]
        found = self._client.masks(given, num_awaited=num_awaited, wait_s=wait_s)
        return [
            int.from_bytes(one, "little").bit_length() - 1 if isinstance(one, bytes) else one
            for one in found
        ]

    def begin(self, quick: MatcherHandle, late: MatcherHandle) -> None:
        """Have the first mask of one made, and that of another begun, which waits for its gate."""
        asked = (quick, [1]), (late, [3])
        # The machine may be busy.
        while (found := self.masks(*asked, num_awaited=2, wait_s=0.2))[0] is None:
            pass
        assert found == [2, None]

    def close(self) -> None:
        self._client.close()
        for process in self.fake.processes:
            process.wait(60.0)


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


def niceness_of_threads(process_id: int) -> dict[int, int]:
    """Return the niceness of each thread of a process."""
    found: dict[int, int] = {}
    for task in Path(f"/proc/{process_id}/task").iterdir():
        # It may have ended meanwhile.
        with suppress(ProcessLookupError):
            found[int(task.name)] = os.getpriority(os.PRIO_PROCESS, int(task.name))
    return found


def num_low_priority(process_id: int) -> int:
    """Return how many threads of a process have a lower priority than its first one."""
    niceness = niceness_of_threads(process_id)
    return sum(one > niceness[process_id] for one in niceness.values())


def test_a_costly_mask_keeps_no_other_waiting_and_is_made_in_the_end(
    client: Client, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    costly = client.matcher(f"waits for: {gate}", "ann"), [3]
    quick, other = client.matcher("plain", "ben"), (client.matcher("plain", "ann"), [1])
    # Nothing else has been requested, so it is not known to be costly.
    client.begin(quick, costly[0])
    (process,) = client.fake.processes
    # Beside the threads that make masks known to be costly.
    wait_for(lambda: num_low_priority(process.pid) == 3)
    token_ids = [1]
    for _ in range(20):
        token_ids.append(1)
        asked = (quick, token_ids), other, costly
        assert client.masks(*asked, num_awaited=2) == [2, 2, None]
    gate.touch()
    assert client.masks(costly, num_awaited=1) == [4]
    assert not other[0].is_costly
    wait_for(lambda: num_low_priority(process.pid) == 2)
    assert client.masks((quick, [*token_ids, 2]), num_awaited=1) == [3]


def test_a_mask_known_to_be_costly_leaves_the_quick_threads_alone(
    client: Client, tmp_path: Path
) -> None:
    gates = [tmp_path / str(number) for number in range(9)]
    matchers = [client.matcher(f"waits for: {gate}") for gate in gates]
    for gate, matcher in zip(gates, matchers, strict=True):
        gate.touch()
        assert client.masks((matcher, [3]), num_awaited=1) == [4]
        gate.unlink()
    late = [(matcher, [3, 3]) for matcher in matchers]
    quick = client.matcher("plain"), [1]
    # More than there are quick threads.
    while (found := client.masks(quick, *late, num_awaited=1, wait_s=0.02))[0] is None:
        pass
    assert found == [2, *[None] * len(late)]
    for gate in gates:
        gate.touch()
    assert client.masks(*late, num_awaited=len(late)) == [4] * len(late)


def test_a_mask_that_takes_more_than_half_of_the_wait_is_costly(client: Client) -> None:
    matcher = client.matcher("takes 50 ms")
    for number, (wait_s, is_costly) in enumerate(((60.0, False), (0.06, True))):
        while client.masks((matcher, [3] * (number + 1)), num_awaited=1, wait_s=wait_s) == [None]:
            pass
        assert matcher.is_costly is is_costly


def test_a_process_that_dies_makes_no_mask_late_forever(client: Client, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    late, quick = (client.matcher(f"waits for: {gate}"), [3]), (client.matcher("plain"), [1])
    client.begin(quick[0], late[0])
    os.kill(client.fake.processes[0].pid, signal.SIGKILL)
    gate.touch()
    assert client.masks(quick, late, num_awaited=2) == [2, 4]
    assert len(client.fake.processes) == 2


def test_a_mask_of_a_sequence_that_has_ended_is_dropped(client: Client, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    quick, late = client.matcher("plain"), client.matcher(f"waits for: {gate}")
    client.begin(quick, late)
    del late
    assert client.masks((quick, [1, 1]), num_awaited=1) == [2]
    gate.touch()
    (process,) = client.fake.processes
    wait_for(lambda: num_low_priority(process.pid) == 2)
    assert client.masks((quick, [1, 1, 2]), num_awaited=1) == [3]
    assert process.poll() is None


def test_a_mask_that_is_late_forever_ends_its_sequence() -> None:
    client = Client(keeps_priority=True)
    endless = client.matcher("spins", "ann"), [3]
    quick = client.matcher("plain", "ben")
    assert client.masks(endless, num_awaited=1, wait_s=0.1) == [None]
    token_ids = [1]
    while (found := client.masks((quick, token_ids), endless, num_awaited=1))[1] is None:
        assert found == [2, None]
        token_ids.append(1)
    assert found[1] is FinishReason.ERROR
    assert "of CPU time" in endless[0].error
    client.close()
