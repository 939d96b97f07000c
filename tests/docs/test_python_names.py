"""The table of vLLM's names in Python: the left ones are missing, the right ones exist."""

from __future__ import annotations

import inspect
import re

import pytest

import pagedray
from pagedray import LLM, SamplingParams
from tests.system.server_process import ROOT

_HEADING = "| in vLLM | in PagedRay |\n"
_TABLE = (ROOT / "docs" / "compatibility.md").read_text().partition(_HEADING)[2]
_ROWS = re.findall(r"^\| (.+?) \| (.+?) \|$", _TABLE.partition("\n\n")[0], re.MULTILINE)[1:]
_NAME = re.compile(r"`(?:LLM\.)?(\w+)`")


def _exists(name: str, cell: str) -> bool:
    if f"`LLM.{name}`" in cell:
        return hasattr(LLM, name)
    if cell.endswith("of `SamplingParams`"):
        return name in SamplingParams.__struct_fields__
    if cell.endswith("of `LLM.generate`"):
        return name in inspect.signature(LLM.generate).parameters
    return name in pagedray.__all__


@pytest.mark.parametrize(("theirs", "ours"), _ROWS)
def test_names_are_missing_or_exist(theirs: str, ours: str) -> None:
    for name in _NAME.findall(theirs.rpartition(" of ")[0] or theirs):
        assert not _exists(name, theirs), name
    for name in re.findall(r"`LLM\.(\w+)`", ours):
        assert hasattr(LLM, name), name
    for name in re.findall(r"`([A-Z][a-z]\w+)`", ours):
        assert name in pagedray.__all__, name
    if "`structure`" in ours:
        assert "structure" in SamplingParams.__struct_fields__


def test_the_table_is_read() -> None:
    assert len(_ROWS) == 8
