"""A group of ranks in processes of their own: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from pagedray.errors import DeviceError
from workers.parallel.group import ParallelGroup
from workers.parallel.network_interface import interface_of
from workers.parallel.rendezvous import LOOPBACK, Rendezvous

__all__ = ["ProcessGroup"]

_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


class ProcessGroup(ParallelGroup):
    """Ranks in processes of their own: NCCL on GPUs, gloo on CPUs.

    The ranks meet at a TCP store that rank 0 opens at `address`, a host and a port, for one group;
    `rendezvous` is its socket, if rank 0 listens already. `host` is the address where the other
    ranks reach this one. Every wait times out after `timeout_s`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        device: torch.device,
        address: tuple[str, int],
        host: str = LOOPBACK,
        rendezvous: Rendezvous | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__(rank, size)
        timeout = timedelta(seconds=timeout_s)
        try:
            if rank == 0 and rendezvous is None:
                rendezvous = Rendezvous(*address)
            store = PrefixStore("pagedray", _open_store(address, size, rendezvous, timeout))
            open_backend = _open_nccl if device.type == "cuda" else _open_gloo
            self._backend = open_backend(
                store, rank, size, timeout=timeout, host=host, device=device
            )
            self._device = device
            # The first collective connects the ranks, so that network errors are raised here.
            self.barrier()
        except (RuntimeError, OSError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise DeviceError(
                f"Rank {rank} of {size} could not join its group at {address[0]}:{address[1]}: "
                f"{first_line}"
            ) from error
        # The backend uses the store as long as the group lives.
        self._store = store

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._backend.allreduce([tensor]).wait()
        return tensor

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        num_rows, local = tensor.shape
        parts = tensor.new_empty((self.size * num_rows, local))
        self._backend._allgather_base(parts, tensor.contiguous()).wait()
        by_rank = parts.view(self.size, num_rows, local)
        return by_rank.transpose(0, 1).reshape(num_rows, self.size * local)

    def barrier(self) -> None:
        token = torch.zeros(1, device=self._device)
        self.all_reduce(token).cpu()

    def close(self) -> None:
        self._backend.shutdown()


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
