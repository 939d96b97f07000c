"""The figures of a run and its environment, printed and written as JSON."""

from __future__ import annotations

import json
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from bench.records.machine import cpu_name

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["Report", "run_environment", "times_ms"]

_PACKAGES = ("grpcio", "msgspec", "protobuf", "pydantic", "ray", "starlette", "torch", "uvicorn")


class Report:
    """The figures of one program."""

    def __init__(self, module: str) -> None:
        """`module` is the program, such as `tests.load.overload`."""
        self._found = run_environment(module)

    @staticmethod
    def add_argument(parser: argparse.ArgumentParser) -> None:
        """Add the option for the output file."""
        parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures here")

    def add(self, name: str, figures: object) -> None:
        """Add and print figures."""
        self._found[name] = figures
        print(json.dumps({name: figures}), flush=True)

    def write(self, path: Path | None) -> None:
        """Write all figures as JSON, if a path is given."""
        if path is not None:
            path.write_text(json.dumps(self._found, indent=1) + "\n")


def run_environment(module: str) -> dict[str, object]:
    """Return the command, the date, and the machine and packages that figures depend on."""
    return {
        "command": " ".join(["python -m", module, *_arguments()]),
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "packages": {package: version(package) for package in _PACKAGES},
    }


def times_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return count, median, 99th percentile and maximum."""
    ordered = sorted(seconds)
    if not ordered:
        return {"count": 0}
    places = {"p50_ms": len(ordered) // 2, "p99_ms": len(ordered) * 99 // 100, "max_ms": -1}
    return {"count": len(ordered)} | {
        name: round(ordered[place] * 1e3, 2) for name, place in places.items()
    }


def _arguments() -> list[str]:
    """Return the arguments without the output file."""
    given = sys.argv[1:]
    if "--output" in given:
        place = given.index("--output")
        del given[place : place + 2]
    return given
