"""A group of ranks in processes of their own: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from pagedray.errors import DeviceError
from pagedray.rank_progress import Phase, ProgressWord
from workers.parallel.group import GroupBrokenError, ParallelGroup
from workers.parallel.network_interface import interface_of
from workers.parallel.one_shot import OneShotAllReduce, RowShape
from workers.parallel.peer_memory import PeerMemoryError
from workers.parallel.rendezvous import LOOPBACK, Rendezvous

__all__ = ["ProcessGroup"]

logger = logging.getLogger(__name__)

_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class ProcessGroup(ParallelGroup):
    """Ranks in processes of their own: NCCL on GPUs, gloo on CPUs.

    The ranks meet at a TCP store that rank 0 opens, one for each time that they join. Every wait
    times out after `timeout_s`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        device: torch.device,
        timeout_s: float = 300.0,
        progress: ProgressWord | None = None,
        rows: RowShape | None = None,
    ) -> None:
        super().__init__(rank, size, progress)
        self._device = device
        self._rows = rows
        self._own_memory: OneShotAllReduce | None = None
        self._timeout = timedelta(seconds=timeout_s)
        # Any, since the stubs of the backends differ between builds of torch.
        self._backend: Any = None
        self._store: Store | None = None

    def join(
        self, address: tuple[str, int], *, host: str, rendezvous: Rendezvous | None = None
    ) -> None:
        assert self._backend is None
        self.progress.enter(Phase.JOINING)
        try:
            if self.rank == 0 and rendezvous is None:
                rendezvous = Rendezvous(*address)
            store = PrefixStore(
                "pagedray", _open_store(address, self.size, rendezvous, self._timeout)
            )
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
            first_line = str(error).strip().partition("\n")[0]
            raise DeviceError(
                f"Rank {self.rank} of {self.size} could not join its group at "
                f"{address[0]}:{address[1]}: {first_line}"
            ) from error

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
        # Closes the connections, which ends the collectives of ranks that wait for this one.
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
                    rows, self.rank, size, device=self._device, progress=self.progress
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


def _open_store(
    address: tuple[str, int], size: int, rendezvous: Rendezvous | None, timeout: timedelta
) -> TCPStore:
    host, port = address
    if rendezvous is None:
        return TCPStore(host, port, size, is_master=False, timeout=timeout)
    return TCPStore(
        host,
        rendezvous.port,
        size,
        is_master=True,
        timeout=timeout,
        master_listen_fd=rendezvous.detach(),
    )


# Any, since the stubs of these bindings differ between builds of torch.
def _open_gloo(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout: timedelta,
    host: str,
    device: torch.device,
) -> Any:
    # Without a device, gloo binds to the address of the host name, which often does not resolve.
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _open_nccl(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout: timedelta,
    host: str,
    device: torch.device,
) -> Any:
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        raise DeviceError("This build of torch lacks NCCL, which tensor parallelism on GPUs needs.")
    options = nccl.Options()
    options._timeout = timeout
    # Kernels wait for collectives, so that a stream of lower priority would only add latency.
    options.is_high_priority_stream = True
    _choose_nccl_interface(host)
    # Otherwise torch ends the process of a rank whose peer has died, before it can leave the group.
    os.environ[_NCCL_ERRORS] = "0"
    # Ray shows a rank only the GPU that is its own.
    torch.cuda.set_device(device.index or 0)
    return nccl(store, rank, size, options)


def _choose_nccl_interface(host: str) -> None:
    """Restrict NCCL to the network interface where the other ranks reach this one."""
    if host == LOOPBACK:
        # Overrides a value of the user, which is for groups on several nodes.
        os.environ[_NCCL_INTERFACE] = "=lo"
        return
    interface = interface_of(host)
    if interface is not None:
        # Without the equals sign NCCL takes it for a prefix of a name.
        os.environ.setdefault(_NCCL_INTERFACE, f"={interface}")
