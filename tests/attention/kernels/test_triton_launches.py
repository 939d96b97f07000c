"""Launches of kernels: compilation, specialization and dependent launches."""

import ast
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.kernels.triton.kernel_launcher import KernelLauncher
from tests.system.server_process import ROOT

CASE = "sums over ranks"
CHANGING = {"num_pairs", "table_stride", "table_width"}
"""Arguments that no captured graph has with all of its values: Triton compiles a kernel anew for 1
and for multiples of 16."""
KERNELS = ROOT / "attention" / "kernels" / "triton"
BEFORE = {
    "_early_tiles",
    "arange",
    "full",
    "min",
    "minimum",
    "num_programs",
    "program_id",
    "to",
    "weight_vectors",
    "zeros",
}
"""What a kernel may call before it waits: nothing that reads or writes but the read of weights, and
of experts that `test_experts_are_known_before_the_second_product_starts` is about."""
UPLOADED = {
    "attend_item": {"item", "item_words", "row_words", "positions", "slots"},
    "_write_new_tokens": {"positions", "slots", "token", "entries", "half"},
    "_add_normed": {"norm", "output_norm", "other_norm", "first", "scale"},
    "_step": {"rows", "segment", "states"},
}
"""Pointers (and sizes) by which kernels read what was uploaded before the step, weights, or what
only earlier steps wrote."""
LOADS = {"load", "_row"}
PLACES = {"first_row", "is_vector", "only", "rows"}
"""What was so read, and says where to read more."""


class Kernel:
    """A kernel whose launches are kept, with what they were compiled for, if they were."""

    def __init__(self) -> None:
        self.launches: list[tuple[object, ...]] = []
        self.num_compiled = 0

    def __getitem__(self, grid: tuple[int, int, int]) -> object:
        def compile_and_launch(*arguments: object, **options: int) -> object:
            self.num_compiled += 1
            self.launches.append((grid, *arguments))
            return Compiled(self)

        return compile_and_launch


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> object:
        return lambda *arguments: self._kernel.launches.append((grid, *arguments))


def test_each_kind_of_arguments_is_compiled_once() -> None:
    kernel = Kernel()
    launcher = KernelLauncher(kernel)
    numbers = torch.zeros(64)
    aligned, other, unaligned = numbers[:8], numbers[32:40], numbers[1:9]
    cases = [
        ((aligned, other), (8, 0.5, True), 4, 1),
        # Other tensors of the same kind, on another grid.
        ((other, aligned), (8, 0.5, True), 4, 1),
        ((unaligned, other), (8, 0.5, True), 4, 2),
        ((aligned, unaligned), (8, 0.5, True), 4, 3),
        ((aligned.int(), other), (8, 0.5, True), 4, 4),
        ((aligned, other), (9, 0.5, True), 4, 5),
        ((aligned, other), (8, 0.25, True), 4, 6),
        ((aligned, other), (8, 0.5, False), 4, 7),
        ((aligned, other), (8, 0.5, True), 8, 8),
        ((unaligned, aligned), (8, 0.5, True), 4, 8),
    ]
    for row, (tensors, arguments, num_warps, num_compiled) in enumerate(cases):
        launcher.launch((row + 1, 1, 1), tensors, arguments, num_warps=num_warps)
        assert kernel.num_compiled == num_compiled
        grid, *launched = kernel.launches[-1]
        assert grid == (row + 1, 1, 1)
        assert all(one is two for one, two in zip(launched[:2], tensors, strict=True))
        assert tuple(launched[2:]) == arguments
    assert len(kernel.launches) == len(cases)


def test_rows_are_compiled_for_one_for_multiples_of_16_and_for_others() -> None:
    kernel = Kernel()
    launcher = KernelLauncher(kernel)
    tensor = torch.zeros(8)
    cases = [(1, 1), (16, 2), (1600, 2), (2, 3), (15, 3), (1601, 3), (1, 3)]
    for num_rows, num_compiled in cases:
        launcher.launch((1, 1, 1), (tensor,), (0.5,), (num_rows,), num_warps=4)
        assert kernel.num_compiled == num_compiled
        assert kernel.launches[-1] == ((1, 1, 1), tensor, num_rows, 0.5)


# Any: JSON values
def compiled(folder: Path, *options: str) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.attention.kernels.hopper.compile_in_parallel",
            CASE,
            *options,
        ],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(folder)},
    )
    assert process.returncode == 0, process.stderr[-2000:]
    found: dict[str, Any] = json.loads(process.stdout)
    return found


@pytest.mark.slow
def test_launches_find_what_threads_have_compiled(tmp_path: Path) -> None:
    first = compiled(tmp_path)
    assert first["compiled"] == len(first["hashes"]) > 4
    assert first["missing"] == 0
    kernels = {path.name for path in tmp_path.iterdir()}
    assert len(kernels) == first["compiled"]
    # Launches of a process that compiles one kernel after the other find them on the disk.
    assert compiled(tmp_path, "--serially")["hashes"] == first["hashes"]
    assert {path.name for path in tmp_path.iterdir()} == kernels


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
    for path in sorted(KERNELS.rglob("*.py")):
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


@cache
def dependent_kernels() -> dict[str, ast.FunctionDef]:
    """Return the kernels that may start early, by their names."""
    return {
        function.name: function
        for path in sorted(KERNELS.rglob("*.py"))
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
        if isinstance(call, ast.Call) and LOADS.intersection(called_names(call)[:1])
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
        allowed = BEFORE | LOADS if name in UPLOADED else BEFORE
        assert allowed.issuperset(called_names(statement))
        for read in loads(statement):
            assert UPLOADED[name] | PLACES >= read


def test_experts_are_known_before_the_second_product_starts() -> None:
    first, second = (
        ast.unparse(dependent_kernels()[name]) for name in ("_gate_up_rows", "_down_rows")
    )
    assert "_early_tiles" in second
    waits, starts = (first.index(call) for call in ("starts_next=False", "start_next_kernel("))
    assert waits < starts
    file = (KERNELS / "experts" / "rows.py").read_text()
    launches = file[file.index("def row_expert_sums") :]
    assert launches.index("_gate_up_rows[") < launches.index("_down_rows[")


def test_all_kernels_of_a_decode_step_are_looked_at() -> None:
    assert {"_add_norm", "_all_reduce", "attend_item", "_gemv"} < set(dependent_kernels())
