"""Gives compiled kernels the same names in Triton's cache on disk in every process."""

from __future__ import annotations

from hashlib import sha256
from importlib import import_module
from pkgutil import walk_packages

from triton.runtime.jit import JITFunction

import attention.kernels.triton

__all__ = ["fix_kernel_keys"]


def fix_kernel_keys() -> str:
    """Import every kernel and compute its key, in an order that does not depend on their use.

    In Triton before 3.9, the key of a kernel depends on which of the functions that it calls were
    part of a key before. A replacement rank runs kernels in another order than a rank that starts,
    and would compile them again: 10 s for the sampling kernels.

    Returns a digest of all keys: kernels with the same digest are compiled to the same code.
    """
    digest = sha256()
    package = attention.kernels.triton
    names = sorted(one.name for one in walk_packages(package.__path__, f"{package.__name__}."))
    for name in names:
        for value in vars(import_module(name)).values():
            # Under the interpreter, functions are of another type.
            if isinstance(value, JITFunction):
                digest.update(value.cache_key.encode())
    return digest.hexdigest()
