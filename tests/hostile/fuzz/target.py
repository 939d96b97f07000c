"""A fuzzing target: a parser, and the inputs that fuzzing starts from."""

from __future__ import annotations

import atexit
import importlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Target",
    "check_message",
    "load_target",
    "run_within_limits",
    "scratch_folder",
    "target_names",
]

_FOLDER = Path(__file__).parent / "targets"
_MODULES = {
    name.lower(): path.stem
    for path in _FOLDER.glob("*.py")
    for name in re.findall(r"^([A-Z_]+) = Target\(", path.read_text(), re.MULTILINE)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One parser of bytes from outside."""

    run: Callable[[bytes], None]
    """Parses an input; every exception is a defect, since it catches those that are documented."""
    seeds: tuple[bytes, ...]
    """Valid inputs, from which others are made."""
    words: tuple[bytes, ...] = ()
    """Texts that occur in inputs of the format."""
    max_bytes: int = 2048
    """The longest input."""


def check_message(error: Exception) -> None:
    """Raise AssertionError unless an error's message is one line, for the log."""
    assert "\n" not in str(error), repr(str(error))


def target_names() -> list[str]:
    """Return the names of all targets, which are constants of the modules in `targets/`."""
    return sorted(_MODULES)


def load_target(name: str) -> Target:
    """Return a target, with everything imported and cached that its inputs need."""
    module = importlib.import_module(f"tests.hostile.fuzz.targets.{_MODULES[name]}")
    found = getattr(module, name.upper())
    assert isinstance(found, Target)
    for seed in found.seeds:
        found.run(seed)
    return found


# A hundred times as long as any input takes on a slow machine while branches are counted.
_MAX_CPU_S = 1.0
_MAX_GROWTH_KIB = 128 * 1024
_PROCESS = Path("/proc/self")
_FORGET_PEAK = "5"


def run_within_limits(target: Target, data: bytes) -> None:
    """Run a target; raise AssertionError if it takes more than a second or 128 MiB."""
    # Otherwise, memory below an earlier peak of the process would not be counted.
    (_PROCESS / "clear_refs").write_text(_FORGET_PEAK)
    started_s, peak_kib = time.process_time(), _peak_kib()
    target.run(data)
    taken_s, growth_kib = time.process_time() - started_s, _peak_kib() - peak_kib
    assert taken_s < _MAX_CPU_S, f"The input took {taken_s:.1f} s of CPU time."
    assert growth_kib < _MAX_GROWTH_KIB, f"The input took {growth_kib // 1024} MiB of memory."


def _peak_kib() -> int:
    [found] = re.findall(r"VmHWM:\s+(\d+) kB", (_PROCESS / "status").read_text())
    return int(found)


_MEMORY = Path("/dev/shm")


def scratch_folder() -> Path:
    """Return a folder that is removed at exit, in memory if possible."""
    place = _MEMORY if _MEMORY.is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=place))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
