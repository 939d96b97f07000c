"""docs/reliability.md has a row for each fault, and its commands exist."""

import ast
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from tests.chaos.__main__ import make_parser
from tests.chaos.faults import FAULTS
from tests.chaos.run import applicable

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "reliability.md").read_text()
# A command stands alone between backticks, or in a line of its own.
COMMANDS = re.findall(r"`((?:python -m|make|scripts/test) [^`]+)`", TEXT) + re.findall(
    r"^((?:python -m|make|scripts/test) .+)$", TEXT, re.MULTILINE
)


def rows() -> set[str]:
    """Return the first cells of all tables."""
    return {line.split("|")[1].strip() for line in TEXT.splitlines() if line.startswith("| ")}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_every_fault_has_a_row(fault: type) -> None:
    name = fault.name  # type: ignore[attr-defined]  # a class of Fault
    assert any(row.startswith(name) for row in rows()), f"No row begins with {name!r}."


def test_the_document_has_commands() -> None:
    assert len(COMMANDS) > 3


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_every_command_exists(command: str) -> None:
    # FAULT stands for any of them.
    words = shlex.split(command.replace("FAULT", FAULTS[0].__name__))
    if words[:3] == ["python", "-m", "tests.chaos"]:
        make_parser().parse_args(words[3:])
    elif words[0] == "python":
        module = ROOT.joinpath(*words[2].split("."))
        assert module.with_suffix(".py").exists() or (module / "__main__.py").exists()
    elif words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
    else:
        options = dict(pairwise(words))
        marks, keyword = options.get("-m", "not slow"), options.get("-k", "")
        paths = [ROOT / word for word in words if word.startswith("tests/")]
        assert paths
        for path in paths:
            assert runs_a_test(path, marks, keyword), f"{path} has no such test."


def runs_a_test(path: Path, marks: str, keyword: str) -> bool:
    """Return whether pytest runs any test of a file or folder, given its -m and -k."""
    if path.is_dir():
        return any(runs_a_test(file, marks, keyword) for file in path.rglob("test_*.py"))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_named = node.name.startswith("test_") and keyword in node.name
            slow = [one for one in map(ast.unparse, node.decorator_list) if "mark.slow" in one]
            # Parameters may be slow one by one.
            runs_fast = "pytest.mark.slow" not in slow and not is_slow(path)
            if is_named and {"not slow": runs_fast, "slow": slow or is_slow(path)}.get(marks, True):
                return True
    return False


def is_slow(path: Path) -> bool:
    """Return whether all tests of a file are slow."""
    return "\npytestmark = pytest.mark.slow" in path.read_text()


def test_every_fault_applies_to_a_target() -> None:
    reached = {
        fault
        for target in ("server", "serve")
        for fault in applicable(FAULTS, target=target, has_rank_processes=True, can_fill_disk=True)
    }
    assert reached == set(FAULTS)
