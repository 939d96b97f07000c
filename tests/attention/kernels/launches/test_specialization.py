"""What changes from step to step gives a kernel no variant to compile while it serves."""

from __future__ import annotations

import ast
from pathlib import Path

import attention.kernels.triton

ROOT = Path(attention.kernels.triton.__file__).parent
CHANGING = {"num_pairs", "table_stride", "table_width"}
"""Arguments that no captured graph has with all of its values: Triton compiles a kernel anew for 1
and for multiples of 16."""


def unspecialized(function: ast.FunctionDef) -> set[str] | None:
    """Return the arguments for which a kernel has no variants; None if it is no kernel."""
    for decorator in function.decorator_list:
        if ast.unparse(decorator) == "triton.jit":
            return set()
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "triton.jit":
            [names] = [one.value for one in decorator.keywords if one.arg == "do_not_specialize"]
            return set(ast.literal_eval(names))
    return None


def test_no_kernel_has_variants_for_what_changes_from_step_to_step() -> None:
    checked: set[str] = set()
    for path in sorted(ROOT.rglob("*.py")):
        for function in ast.parse(path.read_text()).body:
            if not isinstance(function, ast.FunctionDef):
                continue
            found = unspecialized(function)
            # Functions that kernels call are compiled with them.
            if found is None or "Launched by" not in (ast.get_docstring(function) or ""):
                continue
            changing = CHANGING & {argument.arg for argument in function.args.args}
            assert changing <= found, function.name
            checked |= {function.name} if changing else set()
    assert {"_attend_chunks", "attend_item", "_gather_tokens"} <= checked
