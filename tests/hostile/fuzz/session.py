"""One run of a target in a process of its own."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.hostile.fuzz.target import load_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

__all__ = ["Session", "read_corpus", "write_corpus"]

_ROOT = Path(__file__).parents[3]
_FOLDERS = tuple(f"{_ROOT / name}/" for name in ("attention", "cluster", "pagedray", "workers"))

Line = tuple[str, int, int]
"""File, line, and the line before it."""


def inputs_that_reach_more(
    run: Callable[[bytes], None], inputs: Iterable[bytes]
) -> Iterator[bytes]:
    """Yield the inputs that pass from one line to another as no shorter one does, in order."""
    known: set[Line] = set()
    for one in sorted(set(inputs), key=lambda content: (len(content), content)):
        found = _reached(run, one)
        if not found <= known:
            known |= found
            yield one


def _reached(run: Callable[[bytes], None], content: bytes) -> set[Line]:
    found: set[Line] = set()
    last: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, argument: object) -> object:
        name = frame.f_code.co_filename
        if not name.startswith(_FOLDERS):
            return None
        if event == "line":
            found.add((name, frame.f_lineno, last.get(frame, 0)))
            last[frame] = frame.f_lineno
        elif event == "return":
            last.pop(frame, None)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]  # a local trace function has the same form
    try:
        run(content)
    finally:
        sys.settrace(before)
    return found


_FOLDER = Path(__file__).parent / "corpus"


def read_corpus(name: str) -> list[bytes]:
    """Return the inputs of a target; none if it has no file."""
    path = _FOLDER / f"{name}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line).encode("latin-1") for line in path.read_text("ascii").splitlines()]


def write_corpus(name: str, inputs: Iterable[bytes]) -> None:
    """Replace the inputs of a target."""
    lines = sorted(json.dumps(one.decode("latin-1")) + "\n" for one in set(inputs))
    (_FOLDER / f"{name}.jsonl").write_text("".join(lines), "ascii")


_NUM_INPUTS = re.compile(r"stat::number_of_executed_units: +(\d+)")
_ARTIFACT = re.compile(r"Test unit written to (\S+)")
_COVERAGE = re.compile(r"\bcov: (\d+)")
_TRACEBACK = "Uncaught Python exception"
_TIMEOUT_S = 30
"""Of one input, if the process does not get to measure it."""
_MEMORY_MIB = 2048
_MARGIN_S = 120.0
_REPORT_LENGTH = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionResult:
    """What a run found."""

    num_inputs: int
    coverage: int
    """Branches reached."""
    defect: str
    """The report of the defect that ended the run, or nothing."""
    input: bytes
    """The input that causes the defect."""


class Session:
    """A target with a folder of inputs, which grows from run to run."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._inputs = folder / name
        self._inputs.mkdir(parents=True, exist_ok=True)
        self._words = folder / f"{name}.dict"
        self._defects = folder / f"{name}-"
        self._target = load_target(name)
        _save(self._inputs, (*self._target.seeds, *read_corpus(name)))
        self._words.write_text("".join(f'"{_escaped(word)}"\n' for word in self._target.words))

    def run(self, seconds: float, *, seed: int) -> SessionResult:
        """Fuzz for some time, or until a defect is found; 0 seeds by the time."""
        return self._result(
            self._execute(
                str(self._inputs),
                f"-max_total_time={max(1, round(seconds))}",
                f"-seed={seed}",
                # An empty file is an error.
                *((f"-dict={self._words}",) if self._target.words else ()),
                f"-artifact_prefix={self._defects}",
                timeout_s=seconds + _MARGIN_S,
            )
        )

    def smallest_inputs(self) -> list[bytes]:
        """Return few inputs that reach the same code as all do, the shortest first."""
        inputs = [path.read_bytes() for path in self._inputs.iterdir()]
        return list(inputs_that_reach_more(self._target.run, inputs))

    def _execute(self, *options: str, timeout_s: float) -> str:
        """Run libFuzzer and return what it prints."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.hostile.fuzz.fuzz_target", self._name, *options),
                f"-max_len={self._target.max_bytes}",
                f"-timeout={_TIMEOUT_S}",
                f"-rss_limit_mb={_MEMORY_MIB}",
                "-print_final_stats=1",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
        output = done.stdout.decode(errors="replace")
        assert _NUM_INPUTS.search(output) or done.returncode, output
        return output + ("" if done.returncode == 0 else f"\nexit code {done.returncode}")

    def _result(self, output: str) -> SessionResult:
        found = _NUM_INPUTS.search(output)
        place = output.find(_TRACEBACK)
        has_failed = "exit code" in output.rpartition("\n")[2]
        artifact = _ARTIFACT.search(output)
        report = (output[place:] if place >= 0 else output)[-_REPORT_LENGTH:]
        return SessionResult(
            num_inputs=int(found[1]) if found else 0,
            coverage=max(map(int, _COVERAGE.findall(output)), default=0),
            defect=report if has_failed else "",
            input=Path(artifact[1]).read_bytes() if artifact else b"",
        )


def _save(folder: Path, inputs: Iterable[bytes]) -> None:
    for one in inputs:
        (folder / hashlib.sha1(one, usedforsecurity=False).hexdigest()).write_bytes(one)


def _escaped(word: bytes) -> str:
    return "".join(
        chr(one) if 0x20 <= one < 0x7F and one not in b'"\\' else f"\\x{one:02x}" for one in word
    )
