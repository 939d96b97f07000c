"""Fuzzes all parsers of bytes from outside: `python -m tests.hostile.fuzz`.

Each target in `targets/` says what it may raise; anything else is a defect, and so is an input that
takes more than a second of CPU time or 128 MiB of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.hostile.fuzz.session import Session, write_corpus
from tests.hostile.fuzz.target import target_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MAX_CORPUS_BYTES = 10_000
"""Of one target in the repository."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz the targets in turn, print what each found, and return 1 if that is a defect."""
    options = _parser().parse_args(arguments)
    if importlib.util.find_spec("atheris") is None:
        print("Skipped: atheris, which supports Python 3.11 to 3.13 on x86-64, is not installed.")
        return 0
    total, num_defects = 0, 0
    with _folder(options.folder) as folder:
        for name in options.targets:
            session = Session(name, folder)
            result = session.run(options.seconds / len(options.targets), seed=options.seed)
            total += result.num_inputs
            print(f"{name:18} {result.num_inputs:10,} inputs, {result.coverage:5} branches")
            if result.defect:
                num_defects += 1
                print(f"{result.defect}\nINPUT {result.input!r}")
            elif options.update_corpus:
                write_corpus(name, _first(session.smallest_inputs(), _MAX_CORPUS_BYTES))
            sys.stdout.flush()
    print(f"{total:,} inputs, {num_defects} defects")
    return 1 if num_defects else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.hostile.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="of all targets together (%(default)s)")
    add("--targets", nargs="+", choices=target_names(), default=target_names(), metavar="NAME")
    add("--seed", type=int, default=0, help="0: a random one (%(default)s)")
    add("--folder", type=Path, help="where found inputs are kept; default: a temporary one")
    add("--update-corpus", action="store_true", help="write the smallest inputs to corpus/")
    return parser


def _first(inputs: Sequence[bytes], max_bytes: int) -> Iterator[bytes]:
    """Yield as many inputs as fit."""
    for one in inputs:
        max_bytes -= len(one)
        if max_bytes < 0:
            return
        yield one


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
        yield Path(temporary)


if __name__ == "__main__":
    sys.exit(main())
