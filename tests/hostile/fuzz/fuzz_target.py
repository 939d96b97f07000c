"""Fuzzes one target with atheris until an option of libFuzzer or a defect ends the process.

    python -m tests.hostile.fuzz.fuzz_target NAME FOLDER [options of libFuzzer]

libFuzzer reads the inputs in the folder and adds those that reach other code. It never returns, so
that each target needs a process of its own.
"""

from __future__ import annotations

import logging
import sys

import atheris

from tests.hostile.fuzz.target import load_target, run_within_limits

_PACKAGES = ["attention", "cluster", "pagedray", "workers"]


def main() -> None:
    """Fuzz; a defect ends the process with a traceback."""
    name, *options = sys.argv[1:]
    # Millions of lines about invalid input would be all that the time is spent on.
    logging.disable(logging.ERROR)
    # In modules that are imported here, branches are counted.
    with atheris.instrument_imports(include=_PACKAGES):
        target = load_target(name)
    atheris.Setup([sys.argv[0], *options], lambda data: run_within_limits(target, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
