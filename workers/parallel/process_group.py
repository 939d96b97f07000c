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

    They meet at a TCP store that rank 0 opens at `address`, a host and a port, one group only;
    `rendezvous` is its socket, if rank 0 listens already. `host` is the address under which the
    others reach this rank. Every wait ends after `timeout_s`.
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
            # The first collective connects the ranks; whatever is wrong shows here, by name.
            self.barrier()
        except (RuntimeError, OSError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise DeviceError(
                f"rank {rank} of {size} could not join its group at {address[0]}:{address[1]}: "
                f"{first_line}"
            ) from error
        # The store is the ranks' meeting point as long as the group lives.
        self._store = store

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace a tensor by its sum over the ranks, in place, and return it."""
        self._backend.allreduce([tensor]).wait()
        return tensor

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `[n, local]` of every rank side by side in rank order: `[n, local * size]`."""
        num_rows, local = tensor.shape
        parts = tensor.new_empty((self.size * num_rows, local))
        self._backend._allgather_base(parts, tensor.contiguous()).wait()
        by_rank = parts.view(self.size, num_rows, local)
        return by_rank.transpose(0, 1).reshape(num_rows, self.size * local)

    def barrier(self) -> None:
        """Return when every rank has called this."""
        token = torch.zeros(1, device=self._device)
        self.all_reduce(token).cpu()

    def close(self) -> None:
        """Leave the group. CUDA graphs that captured its collectives must be dropped before."""
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


# The classes below are torch's own bindings; their stubs differ between builds of torch.
def _open_gloo(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout: timedelta,
    host: str,
    device: torch.device,
) -> Any:
    # Without a device gloo binds to what the host's name resolves to, which is often nothing.
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
        raise DeviceError("this build of torch has no NCCL, which GPUs of one group need.")
    options = nccl.Options()
    options._timeout = timeout
    # Collectives wait for one another anyway: a stream of lower priority would only add delay.
    options.is_high_priority_stream = True
    _choose_nccl_interface(host)
    # Ray shows a rank only the GPU that is its own.
    torch.cuda.set_device(device.index or 0)
    return nccl(store, rank, size, options)


def _choose_nccl_interface(host: str) -> None:
    """Have NCCL meet the others where they reach this rank, and not where it thinks best."""
    if host == LOOPBACK:
        # Also if another one is set, which is for groups of several nodes.
        os.environ[_NCCL_INTERFACE] = "=lo"
        return
    interface = interface_of(host)
    if interface is not None:
        # Without the sign it would be the beginning of a name.
        os.environ.setdefault(_NCCL_INTERFACE, f"={interface}")
