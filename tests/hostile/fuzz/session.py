"""One run of a target in a process of its own."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.hostile.fuzz.corpus_file import read_corpus
from tests.hostile.fuzz.reached_lines import inputs_that_reach_more
from tests.hostile.fuzz.target import load_target

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Session", "SessionResult"]

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
