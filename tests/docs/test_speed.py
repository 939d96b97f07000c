"""The speed table of the README has the figures of the results that its commands wrote."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]
_ROW = re.compile(
    r"\| (?P<model>[^|]+) \| (?P<num_gpus>\d) (?P<gpu>\w+), (?P<date>[\d-]+) \|"
    r" (?P<latency>[\d.]*) \| (?P<throughput>[\d ]*?) ?\| `(?P<command>[^`]+)` \|"
)
_ROWS = [row.groupdict() for row in _ROW.finditer((_ROOT / "README.md").read_text())]
_OUTPUT = re.compile(r" --output \S+")


def _results_of(command: str, *, gpu: str, date: str) -> dict[str, Any]:  # Any: JSON
    """Return the results that a command wrote on that day, on such a GPU."""
    results = [json.loads(path.read_text()) for path in _ROOT.glob("bench/results/engine*.json")]
    [found] = [
        one
        for one in results
        if _OUTPUT.sub("", one["command"]) == command
        and one["date"] == date
        and gpu in one["device"]
    ]
    assert isinstance(found, dict)
    return found


def _rounded(figure: float, like: str) -> str:
    """Return a figure with as many decimals as another one, and spaces between thousands."""
    decimals = -int(Decimal(like).as_tuple().exponent)
    return f"{figure:,.{decimals}f}".replace(",", " ")


def test_all_rows_are_read() -> None:
    table = (_ROOT / "README.md").read_text().split("## Speed")[1].split("\n## ")[0]
    assert len(_ROWS) == sum(line.startswith("| ") for line in table.splitlines()) - 2 > 4


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: f"{row['model']}, {row['num_gpus']}")
def test_figures_are_those_of_the_results(row: dict[str, str]) -> None:
    results = _results_of(row["command"], gpu=row["gpu"], date=row["date"])
    figures = {
        (one["workload"]["name"], one["workload"]["num_requests"]): one["figure"]
        for one in results["rows"]
    }
    assert _rounded(figures["latency", 1], row["latency"]) == row["latency"]
    if row["throughput"]:
        assert _rounded(figures["throughput", 256], "1") == row["throughput"]
