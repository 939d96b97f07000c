"""Kernels that start early wait before they touch what others write, in every program."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import attention.kernels.triton

ROOT = Path(attention.kernels.triton.__file__).parent
BEFORE = {
    "arange",
    "full",
    "min",
    "minimum",
    "num_programs",
    "program_id",
    "weight_vectors",
    "zeros",
}
"""What a kernel may call before it waits: nothing that reads or writes but the read of weights."""


def dependent_kernels() -> dict[str, ast.FunctionDef]:
    """Return the kernels that may start early, by their names."""
    return {
        function.name: function
        for path in sorted(ROOT.rglob("*.py"))
        for function in ast.parse(path.read_text()).body
        if isinstance(function, ast.FunctionDef)
        and "is_dependent" in [argument.arg for argument in function.args.args]
        and function.name != "wait_for_inputs"
    }


def called_names(node: ast.AST) -> list[str]:
    """Return the last part of the name of whatever a part of a program calls."""
    return [
        call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
    ]


@pytest.mark.parametrize("name", dependent_kernels())
def test_a_kernel_waits_before_it_touches_what_others_write(name: str) -> None:
    body = dependent_kernels()[name].body
    # Only a statement of the kernel itself is run by every program.
    waits = [
        place
        for place, statement in enumerate(body)
        if isinstance(statement, ast.Expr) and called_names(statement) == ["wait_for_inputs"]
    ]
    assert len(waits) == 1
    for statement in body[: waits[0]]:
        assert not any(isinstance(node, ast.Return) for node in ast.walk(statement))
        assert BEFORE.issuperset(called_names(statement))


def test_all_kernels_of_a_decode_step_are_looked_at() -> None:
    assert {"_add_norm", "_all_reduce", "_attend_split", "_gemv", "_merge_splits"} < set(
        dependent_kernels()
    )
