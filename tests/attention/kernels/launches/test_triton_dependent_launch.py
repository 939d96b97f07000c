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
UPLOADED = {
    "attend_item": {"item", "item_words", "row_words", "positions", "slots"},
    "_write_new_tokens": {"positions", "slots", "token", "entries", "half"},
}
"""Pointers (and sizes) by which kernels read what was uploaded before the step, by name."""
PLACES = {"first_row", "is_vector", "only", "rows"}
"""What was so read, and says where to read more."""


def dependent_kernels() -> dict[str, ast.FunctionDef]:
    """Return the kernels that may start early, by their names."""
    return {
        function.name: function
        for path in sorted(ROOT.rglob("*.py"))
        for function in ast.parse(path.read_text()).body
        if isinstance(function, ast.FunctionDef)
        and "is_dependent" in [argument.arg for argument in function.args.args]
        and function.name not in ("start_next_kernel", "wait_for_inputs")
    }


def called_names(node: ast.AST) -> list[str]:
    """Return the last part of the name of whatever a part of a program calls."""
    return [
        call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
    ]


def loads(node: ast.AST) -> list[set[str]]:
    """Return the names in the pointers that a part of a program loads from."""
    return [
        {name.id for name in ast.walk(call.args[0]) if isinstance(name, ast.Name)} - {"places"}
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        if isinstance(call.func, ast.Attribute)
        if call.func.attr == "load"
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
    starts_later = "starts_next=False" in ast.unparse(body[waits[0]])
    starts = [called_names(statement) == ["start_next_kernel"] for statement in body]
    assert starts_later == any(starts[waits[0] :])
    assert sum(starts) == starts_later
    for statement in body[: waits[0]]:
        # A program without work may return, if the schedule gives others of its kernel some.
        assert name in UPLOADED or not any(
            isinstance(node, ast.Return) for node in ast.walk(statement)
        )
        allowed = BEFORE | {"load", "to"} if name in UPLOADED else BEFORE
        assert allowed.issuperset(called_names(statement))
        for read in loads(statement):
            assert UPLOADED[name] | PLACES >= read


def test_all_kernels_of_a_decode_step_are_looked_at() -> None:
    assert {"_add_norm", "_all_reduce", "attend_item", "_gemv"} < set(dependent_kernels())
