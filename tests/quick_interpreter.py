"""Makes Triton's interpreter, which runs kernels on the CPU, three times as fast."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
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

    @cache
    def shape_of(*sizes: int) -> tuple[Any, Any, int]:
        """Return the shapes of a type and of its tensors, and the number of elements."""
        shape = tl.core.tuple(sizes)
        number = validate_block_shape(shape)
        return shape, tl.core.tuple([tl.constexpr(one) for one in sizes]), number

    def init_type(kind: Any, element_ty: Any, shape: Any) -> None:
        if not shape:
            raise TypeError("A block has at least one dimension.")
        kind.element_ty = element_ty
        kind.shape, _, kind.numel = shape_of(*(getattr(one, "value", one) for one in shape))

    def init_tensor(tensor: Any, handle: Any, kind: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        _, tensor.shape, number = shape_of(*(kind.shape.values if kind.is_block() else ()))
        tensor.numel = tl.constexpr(number)

    patch.setattr(interpreter, "_patch_lang", replace_once)
    patch.setattr(interpreter, "_get_np_dtype", dtype_of)
    patch.setattr(tl.block_type, "__init__", init_type)
    name = property(lambda kind: f"<{kind.shape}, {kind.element_ty}>")
    patch.setattr(tl.block_type, "name", name, raising=False)
    patch.setattr(tl.tensor, "__init__", init_tensor)
    # Overflows are computed, but only reported in debug mode.
    patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
