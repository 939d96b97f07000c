"""A group of ranks in separate processes: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import array
import fcntl
import logging
import os
import socket
import struct
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from pagedray.errors import DeviceError
from pagedray.rank_progress import Phase, ProgressWord
from workers.parallel.all_reduce import OneShotAllReduce
from workers.parallel.group import GroupBrokenError, ParallelGroup, SoloGroup
from workers.parallel.peer_memory import PeerMemoryError, RowShape
from workers.parallel.pending_sum import PendingSum
from workers.parallel.rendezvous import (
    LOOPBACK,
    FileRendezvous,
    GroupAddress,
    Rendezvous,
    SocketRendezvous,
)

__all__ = ["make_group"]

logger = logging.getLogger(__name__)

_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_SIOCGIFCONF = 0x8912
_NAME_BYTES = 16
_ENTRY_BYTES = 40
"""Size of `struct ifreq` on 64-bit Linux."""
_ADDRESS = slice(_NAME_BYTES + 4, _NAME_BYTES + 8)
"""Offset of the IPv4 address: after the name, and the family and port of `sockaddr_in`."""
_MAX_ENTRIES = 256

_TIMEOUT_S = 300.0


class ProcessGroup(ParallelGroup):
    """Ranks in processes of their own: NCCL on GPUs, gloo on CPUs.

    The ranks meet at a store that rank 0 opens each time that they join: a file in memory on one
    node, TCP between nodes. Every wait times out after `timeout_s`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        device: torch.device,
        timeout_s: float,
        progress: ProgressWord | None = None,
        rows: RowShape | None = None,
    ) -> None:
        super().__init__(rank, size, progress)
        self._device = device
        self.overlaps_sums = device.type == "cuda"
        self._rows = rows
        self._own_memory: OneShotAllReduce | None = None
        self._timeout = timedelta(seconds=timeout_s)
        # Any, since the stubs of the backends differ between builds of torch.
        self._backend: Any = None
        self._store: Store | None = None
        self._store_file: int | None = None
        """The descriptor of the rendezvous, if it is a file."""

    def join(
        self, address: GroupAddress, *, host: str, rendezvous: Rendezvous | None = None
    ) -> None:
        assert self._backend is None
        self.num_neighbors = self.size if isinstance(address, Path) else 1
        self.progress.enter(Phase.JOINING)
        try:
            # Threads of an earlier backend may still use its store, which has other keys.
            store = PrefixStore(f"pagedray-{address}", self._open_store(address, rendezvous))
            store.set_timeout(self._timeout)
            open_backend = _open_nccl if self._device.type == "cuda" else _open_gloo
            self._backend = open_backend(
                store, self.rank, self.size, timeout=self._timeout, host=host, device=self._device
            )
            # The backend uses the store as long as the group lives.
            self._store = store
            # The first collective connects the ranks, so that network errors are raised here.
            self.barrier()
            self.one_shot = self._open_one_shot(store)
        except (RuntimeError, OSError, GroupBrokenError) as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            place = address if isinstance(address, Path) else f"{address[0]}:{address[1]}"
            raise DeviceError(
                f"Rank {self.rank} of {self.size} could not join its group at {place}: {reason}."
            ) from error
        finally:
            if rendezvous is not None:
                rendezvous.close()

    def abort(self) -> None:
        # A collective of gloo fails by itself when the connection to another rank ends.
        if self.one_shot is not None:
            self.one_shot.abort()
        backend = self._backend
        if backend is not None and self._device.type == "cuda":
            # The device is chosen by thread.
            torch.cuda.set_device(self._device)
            backend.abort()

    def leave(self) -> None:
        if self.one_shot is not None:
            # Its memory stays, since ranks that have not left yet may still write to it.
            self.one_shot.disconnect()
        # Closes the connections, which ends the collectives of ranks that wait for this rank.
        self._backend = self._store = self.one_shot = None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.one_shot is not None and self.one_shot.takes(tensor):
            return self.one_shot.reduce_rows(tensor)
        self.progress.begin_collective(Phase.ALL_REDUCE)
        try:
            self._backend.allreduce([tensor]).wait()
        except RuntimeError as error:
            raise GroupBrokenError(str(error)) from error
        self.progress.end_collective()
        return tensor

    def begin_all_reduce(self, rows: torch.Tensor) -> PendingSum:
        if self.one_shot is not None:
            pending = self.one_shot.begin_sum(rows)
            if pending is not None:
                return pending
        self.progress.begin_collective(Phase.ALL_REDUCE)
        try:
            work = self._backend.allreduce([rows])
        except RuntimeError as error:
            raise GroupBrokenError(str(error)) from error
        self.progress.end_collective()
        return _WorkSum(rows, work, self.progress)

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        num_rows, local = tensor.shape
        parts = tensor.new_empty((self.size * num_rows, local))
        tensor = tensor.contiguous()
        self.progress.begin_collective(Phase.ALL_GATHER)
        try:
            self._backend._allgather_base(parts, tensor).wait()
        except RuntimeError as error:
            raise GroupBrokenError(str(error)) from error
        self.progress.end_collective()
        by_rank = parts.view(self.size, num_rows, local)
        return by_rank.transpose(0, 1).reshape(num_rows, self.size * local)

    def barrier(self) -> None:
        token = torch.zeros(1, device=self._device)
        self.all_reduce(token).cpu()

    def close(self) -> None:
        if self._backend is not None:
            self._backend.shutdown()
        if self._own_memory is not None:
            self._own_memory.close()
        self._backend = self._store = self.one_shot = self._own_memory = None

    def _open_one_shot(self, store: Store) -> OneShotAllReduce | None:
        """Return the all-reduce of a few rows, if all ranks can write to each other's memory."""
        rows, size = self._rows, self.size
        if self._device.type != "cuda" or rows is None or not OneShotAllReduce.can_sum(rows, size):
            return None
        if self._own_memory is None:
            try:
                self._own_memory = OneShotAllReduce(
                    rows,
                    self.rank,
                    size,
                    max_begun_rows=self.max_begun_rows,
                    device=self._device,
                    progress=self.progress,
                )
            except PeerMemoryError as error:
                logger.warning("Small all-reduces use NCCL: %s.", error)
        if not self._agree(self._own_memory is not None):
            return None
        assert self._own_memory is not None
        return self._own_memory if self._own_memory.connect(store, self._agree) else None

    def _agree(self, is_so: bool) -> bool:
        """Return whether this is called with True on all ranks."""
        votes = torch.full((1,), float(is_so), device=self._device)
        return int(self.all_reduce(votes)) == self.size

    def _open_store(self, address: GroupAddress, rendezvous: Rendezvous | None) -> Store:
        if isinstance(address, Path):
            file = FileRendezvous.open(address)
            # A store opens it again by its number for every access, and threads of a backend may
            # outlive it: the number must never become that of a file of something else.
            if self._store_file is None:
                self._store_file = file
            else:
                os.dup2(file, self._store_file, inheritable=False)
                os.close(file)
            return FileStore(f"/proc/self/fd/{self._store_file}", self.size)
        host, port = address
        if self.rank != 0:
            return TCPStore(host, port, self.size, is_master=False, timeout=self._timeout)
        if rendezvous is None:
            rendezvous = SocketRendezvous(host, port)
        assert isinstance(rendezvous, SocketRendezvous)
        return TCPStore(
            host,
            rendezvous.port,
            self.size,
            is_master=True,
            timeout=self._timeout,
            master_listen_fd=rendezvous.detach(),
        )


class _WorkSum(PendingSum):
    """A sum by torch's backend, in place."""

    # Any: torch does not export the type of the handles that its backends return.
    def __init__(self, rows: torch.Tensor, work: Any, progress: ProgressWord) -> None:
        self._rows = rows
        self._work = work
        self._progress = progress

    def finish(self) -> torch.Tensor:
        self._progress.begin_collective(Phase.ALL_REDUCE)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise GroupBrokenError(str(error)) from error
        self._progress.end_collective()
        return self._rows


# Any, since the stubs of these bindings differ between builds of torch.
def _open_gloo(
    store: Store, rank: int, size: int, *, timeout: timedelta, host: str, device: torch.device
) -> Any:
    # Without a device, gloo binds to the address of the host name, which often does not resolve.
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _open_nccl(
    store: Store, rank: int, size: int, *, timeout: timedelta, host: str, device: torch.device
) -> Any:
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        raise DeviceError("This build of torch lacks NCCL, which tensor parallelism on GPUs needs.")
    options = nccl.Options()
    options._timeout = timeout
    # Kernels wait for collectives, so that a stream of lower priority would only add latency.
    options.is_high_priority_stream = True
    _choose_nccl_interface(host)
    # Otherwise torch ends a process after its peer has died, before it can leave the group.
    os.environ[_NCCL_ERRORS] = "0"
    # Ray shows a rank only the GPU that is its own.
    torch.cuda.set_device(device.index or 0)
    return nccl(store, rank, size, options)


def _choose_nccl_interface(host: str) -> None:
    """Restrict NCCL to the network interface that the other ranks use to reach this rank."""
    if host == LOOPBACK:
        # Overrides a value of the user, which is for groups on several nodes.
        os.environ[_NCCL_INTERFACE] = "=lo"
        return
    interface = interface_of(host)
    if interface is not None:
        # Without the equals sign NCCL takes it for a prefix of a name.
        os.environ.setdefault(_NCCL_INTERFACE, f"={interface}")


def interface_of(host: str) -> str | None:
    """Return the name of this node's interface that has the address `host`, or None."""
    try:
        address = ip_address(host)
    except ValueError:
        return None
    names = _ipv4_names() if address.version == 4 else _ipv6_names()
    return names.get(address.packed)


def _ipv4_names() -> dict[bytes, str]:
    entries = array.array("B", bytes(_MAX_ENTRIES * _ENTRY_BYTES))
    begin, size = entries.buffer_info()
    request = struct.pack("iP", size, begin)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        filled, _ = struct.unpack("iP", fcntl.ioctl(query, _SIOCGIFCONF, request))
    found = entries.tobytes()[:filled]
    names = {}
    for start in range(0, filled, _ENTRY_BYTES):
        entry = found[start : start + _ENTRY_BYTES]
        # An additional address of an interface has a label such as eth0:1.
        name = entry[:_NAME_BYTES].partition(b"\0")[0].partition(b":")[0].decode()
        names[entry[_ADDRESS]] = name
    return names


def _ipv6_names() -> dict[bytes, str]:
    table = Path("/proc/net/if_inet6")
    if not table.exists():
        return {}
    lines = [line.split() for line in table.read_text(encoding="ascii").splitlines()]
    return {bytes.fromhex(fields[0]): fields[-1] for fields in lines}


def make_group(
    rank: int,
    size: int,
    *,
    device: torch.device,
    timeout_s: float = _TIMEOUT_S,
    progress: ProgressWord | None = None,
    rows: RowShape | None = None,
) -> ParallelGroup:
    """Return the group of `size` ranks for rank `rank`, which has not joined it yet.

    `rows` is the shape of the rows that layers sum over the ranks, for the faster all-reduce of
    GPUs.
    """
    if size == 1:
        return SoloGroup(progress)
    return ProcessGroup(
        rank, size, device=device, timeout_s=timeout_s, progress=progress, rows=rows
    )
