"""Inputs that fuzzing has found are parsed as their target says, within its limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.hostile.fuzz.session import Session, read_corpus
from tests.hostile.fuzz.target import Target, load_target, run_within_limits, target_names

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", target_names())
def test_corpus_is_parsed(name: str) -> None:
    target = load_target(name)
    inputs = read_corpus(name)
    assert inputs
    for one in inputs:
        run_within_limits(target, one)


def _recurse(data: bytes) -> None:
    _recurse(data)


def _allocate(data: bytes) -> None:
    assert data * (300 * 2**20)


@pytest.mark.parametrize("run", [_recurse, _allocate])
def test_what_is_not_documented_is_a_defect(run: object) -> None:
    target = Target(run=run, seeds=())  # type: ignore[arg-type]  # one of two functions
    # What the process has had and given back does not hide it.
    assert b"x" * (600 * 2**20)
    with pytest.raises((RecursionError, AssertionError)):
        run_within_limits(target, b"x")


@pytest.mark.slow
def test_session_finds_inputs_that_reach_more(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="it has no wheel for this machine")
    session = Session("choices", tmp_path)
    first = session.run(3.0, seed=1)
    assert first.num_inputs > 100
    assert not first.defect
    assert len(list((tmp_path / "choices").iterdir())) > len(load_target("choices").seeds)
