"""The command of a run, for its results."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

__all__ = ["command_and_date"]


def command_and_date() -> dict[str, str]:
    """Return the command of this process, as `python -m` takes it, and today's date."""
    spec = sys.modules["__main__"].__spec__
    program = sys.argv[0] if spec is None else f"-m {spec.name.removesuffix('.__main__')}"
    return {
        "command": " ".join(["python", program, *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
    }
