"""Two ranks in two processes: models and collectives."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from pagedray.errors import DeviceError
from tests.slow_params import some_slow
from tests.system.server_process import free_port
from tests.workers.parallel.joined_group import join_group
from tests.workers.reference import CPU, reference_logits, save_checkpoint
from tests.workers.reference_cases import CASES, EXPERT_PARALLEL_CASES, TWO_RANK_CASES
from workers.parallel.group import GroupBrokenError, ParallelGroup, SoloGroup
from workers.parallel.process_group import _choose_nccl_interface, make_group
from workers.parallel.rendezvous import LOOPBACK, FileRendezvous, GroupAddress

ROOT = Path(__file__).parents[3]
_FIRST = TWO_RANK_CASES[0]
_SLOW = [name for name in TWO_RANK_CASES if name not in TWO_RANK_CASES[::4]]


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest) -> list[str]:
    """The first case, and the cases of the tests of this module that will run."""
    tests = [one for one in request.session.items if one.path == request.path]
    params = [one.callspec.params for one in tests if hasattr(one, "callspec")]
    chosen = {one.get("name") for one in params}
    return [name for name in TWO_RANK_CASES if name == _FIRST or name in chosen]


@pytest.fixture(scope="module")
def folder(names: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in names:
        save_checkpoint(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def ranks(names: list[str], folder: Path) -> list[dict[str, Any]]:
    """The results of each of two ranks, which run the cases."""
    rendezvous = FileRendezvous()
    command = [sys.executable, "-m", "tests.workers.parallel.rank_process"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "2", str(rendezvous.address), str(folder), *names],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
    rendezvous.close()
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def test_cases_hold_one_kv_head_for_two_ranks() -> None:
    assert any(CASES[name]["kv_heads"] == 1 for name in TWO_RANK_CASES)


@pytest.mark.parametrize("name", some_slow(TWO_RANK_CASES, slow=_SLOW))
def test_two_ranks_compute_what_transformers_computes(
    name: str, folder: Path, ranks: list[dict[str, Any]]
) -> None:
    logits = [rank["logits"][name] for rank in ranks]
    torch.testing.assert_close(logits[0], reference_logits(folder / name), rtol=1e-4, atol=1e-4)
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("name", some_slow(EXPERT_PARALLEL_CASES, slow=_SLOW))
def test_whole_experts_on_two_ranks_compute_what_transformers_computes(
    name: str, folder: Path, ranks: list[dict[str, Any]]
) -> None:
    logits = [rank["expert_parallel"][name] for rank in ranks]
    torch.testing.assert_close(logits[0], reference_logits(folder / name), rtol=1e-4, atol=1e-4)
    assert torch.equal(logits[0], logits[1])


def test_two_ranks_agree_in_bfloat16(folder: Path, ranks: list[dict[str, Any]]) -> None:
    exact = reference_logits(folder / _FIRST)
    theirs = reference_logits(folder / _FIRST, torch.bfloat16)
    assert torch.equal(ranks[0]["bfloat16"], ranks[1]["bfloat16"])
    assert (ranks[0]["bfloat16"] - exact).norm() < 1.2 * (theirs - exact).norm()


def test_collectives_of_two_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        results = rank["collectives"]
        assert torch.equal(results["reduced"], torch.full((3, 2), 3.0))
        assert torch.equal(results["gathered"], torch.tensor([[1.0, 1.0, 2.0, 2.0]] * 3))
        assert torch.equal(results["gathered_strided"], torch.tensor([[1.0] * 3 + [2.0] * 3] * 2))


def test_two_ranks_sample_the_tokens_of_sharded_logits(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        sampled = rank["sampled"]
        expected = sampled["expected"]
        assert expected[:3].tolist() == [-1, -1, -1]
        assert torch.equal(sampled["of whole logits"], expected)
        assert torch.equal(sampled["of sharded logits"], expected)
        # Rows that are all alike need a single kind of maxima.
        assert torch.equal(sampled["of greedy rows"][::2], expected[::2])
        assert torch.equal(sampled["of random rows"][5], expected[5])
        assert not torch.equal(sampled["of random rows"], sampled["of greedy rows"])


def test_collectives_of_a_group_of_one_return_their_input() -> None:
    tensor = torch.ones(2, 3)
    with join_group(0, 1, device=CPU, timeout_s=60.0) as group:
        assert isinstance(group, SoloGroup)
        assert group.all_reduce(tensor) is tensor
        assert group.all_gather_last(tensor) is tensor
        group.barrier()


def listeners() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections(kind="inet")
    return {
        (one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN
    }


def listeners_of_two_ranks(address: GroupAddress) -> set[tuple[str, int]]:
    def join(rank: int) -> set[tuple[str, int]]:
        with join_group(rank, 2, device=CPU, address=address, timeout_s=60.0) as group:
            group.barrier()
            found = listeners()
            group.barrier()
            return found

    # Other tests' clusters listen too.
    before = listeners()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(join, range(2))
    return (first | second) - before


def test_ranks_listen_on_the_loopback_only() -> None:
    port = free_port()
    found = listeners_of_two_ranks((LOOPBACK, port))
    assert {host for host, _ in found} == {LOOPBACK}
    assert (LOOPBACK, port) in found


def test_a_rendezvous_on_one_node_has_no_port() -> None:
    with closing(FileRendezvous()) as rendezvous:
        # gloo's own, one for each rank.
        assert len(listeners_of_two_ranks(rendezvous.address)) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_another_user_cannot_open_the_rendezvous() -> None:
    with closing(FileRendezvous()) as rendezvous:
        command = ["/bin/cat", str(rendezvous.address)]
        stranger: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []}
        done = subprocess.run(command, capture_output=True, check=False, **stranger)
        subprocess.run(command, check=True)
    assert b"Permission denied" in done.stderr


def test_the_file_of_another_process_is_no_rendezvous(tmp_path: Path) -> None:
    with (tmp_path / "other").open("wb") as other:
        address = Path(f"/proc/{os.getpid()}/fd/{other.fileno()}")
        with pytest.raises(DeviceError, match="is not a rendezvous"):
            join_group(1, 2, device=CPU, address=address, timeout_s=1.0)


def test_rank_whose_peer_has_left_can_join_another() -> None:
    places = [FileRendezvous(), FileRendezvous()]

    def join(group: ParallelGroup, place: FileRendezvous) -> torch.Tensor:
        group.join(place.address, host=LOOPBACK)
        return group.all_reduce(torch.tensor([group.rank + 1.0]))

    survivor, dying, spare = (make_group(rank, 2, device=CPU, timeout_s=60.0) for rank in (0, 1, 1))
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(join, (survivor, dying), places[:1] * 2)) == [3.0, 3.0]
        dying.leave()
        with pytest.raises(GroupBrokenError):
            survivor.all_reduce(torch.ones(1))
        survivor.abort()
        survivor.leave()
        assert list(pool.map(join, (survivor, spare), places[1:] * 2)) == [3.0, 3.0]
    survivor.close()
    spare.close()
    for place in places:
        place.close()


def test_a_rank_that_no_other_joins_gives_up_in_one_line() -> None:
    with pytest.raises(DeviceError, match="Rank 0 of 2 could not join its group at 127") as caught:
        join_group(0, 2, device=CPU, address=(LOOPBACK, free_port()), timeout_s=0.3)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def own_addresses() -> list[tuple[str, str]]:
    """Return each interface of this machine with each of its addresses, as psutil finds them."""
    return [
        (name, one.address.partition("%")[0])
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family in (socket.AF_INET, socket.AF_INET6)
    ]


def test_nccl_is_kept_to_the_interface_that_others_reach_the_rank_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = own_addresses()
    assert ("lo", "127.0.0.1") in addresses
    for name, address in addresses:
        monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
        _choose_nccl_interface(address)
        expected = "=lo" if address == LOOPBACK else f"={name}"
        assert os.environ["NCCL_SOCKET_IFNAME"] == expected, address


def test_nccl_of_several_nodes_keeps_what_is_set_and_that_of_one_node_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    _choose_nccl_interface("::1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"
    _choose_nccl_interface(LOOPBACK)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no address"])
def test_an_address_of_no_interface_leaves_the_choice_to_nccl(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    _choose_nccl_interface(host)
    assert "NCCL_SOCKET_IFNAME" not in os.environ
