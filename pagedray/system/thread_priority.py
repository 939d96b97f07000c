"""The priority of threads, which the kernel keeps for each of them."""

import ctypes
import os
import platform
import sys

__all__ = ["let_others_interrupt", "lower_priority"]

_LOWEST = 19
_SLICE_NS = 20_000_000
"""Longer than the kernel's default, which is at most 3 ms for up to 8 processors."""
_SCHED_SETATTR = {"aarch64": 274, "x86_64": 314}
"""The number of the system call, for which older C libraries have no function."""


class _Attributes(ctypes.Structure):
    """What `sched_setattr` takes, in its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("niceness", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    )


def lower_priority(thread_id: int, niceness: int) -> None:
    """Give a thread of this process a niceness that much higher, which it cannot lower again.

    `thread_id` is the kernel's, as of `threading.get_native_id`.
    """
    current = os.getpriority(os.PRIO_PROCESS, thread_id)
    os.setpriority(os.PRIO_PROCESS, thread_id, min(current + niceness, _LOWEST))
    let_others_interrupt(thread_id)


def let_others_interrupt(thread_id: int) -> None:
    """Ask the kernel to interrupt a thread that computes whenever another one wakes.

    Since Linux 6.6, a thread that runs may otherwise continue until the next tick, 1 to 10 ms, even
    if its priority is low. From 6.12 on, a thread may request longer time slices, which one that
    wakes with shorter ones interrupts. Threads that it starts inherit that. Other kernels ignore
    it.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or sys.platform != "linux":
        return
    attributes = _Attributes(
        size=ctypes.sizeof(_Attributes),
        policy=os.sched_getscheduler(thread_id),
        niceness=os.getpriority(os.PRIO_PROCESS, thread_id),
        runtime_ns=_SLICE_NS,
    )
    # Without effect where a sandbox does not allow it.
    ctypes.CDLL(None).syscall(number, thread_id, ctypes.byref(attributes), 0)
