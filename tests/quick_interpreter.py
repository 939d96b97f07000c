"""Makes Triton's interpreter, which runs kernels on the CPU, a third faster."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


# Any: parts of Triton that have no types.
def quicken_interpreter(patch: pytest.MonkeyPatch) -> None:
    """Replace functions that the interpreter calls too often."""
    replace_language = interpreter._patch_lang
    numpy_dtype = cache(interpreter._get_np_dtype)

    @cache
    def modules_of(fn: Any) -> list[Any]:
        """Return the modules of the language that a function names."""
        return [one for one in fn.__globals__.values() if one is tl or one is tl.core]

    def replace_once(fn: Any) -> Any:
        """Replace the functions of the language at a launch, not in each function of a kernel."""
        is_replaced = not any(tl.core.is_builtin(module.load) for module in modules_of(fn))
        return interpreter._LangPatchScope() if is_replaced else replace_language(fn)

    def dtype_of(kind: Any) -> Any:
        """Return NumPy's type, without a table that is made for each call."""
        element = kind.element_ty if isinstance(kind, tl.block_type) else kind
        is_pointer = isinstance(element, tl.pointer_type)
        return np.dtype(np.uint64) if is_pointer else numpy_dtype(element)

    patch.setattr(interpreter, "_patch_lang", replace_once)
    patch.setattr(interpreter, "_get_np_dtype", dtype_of)
