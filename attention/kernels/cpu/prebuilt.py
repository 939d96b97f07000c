"""Libraries of the kernels that are compiled with the package, before the CPU is known.

    python -m attention.kernels.cpu.prebuilt

writes them next to the sources, for an image: its containers then compile nothing, and load no code
from a volume, which other users may be able to change. Who can write these libraries can also write
the package.
"""

from __future__ import annotations

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from attention.kernels.cpu.compiler import (
    compile_library,
    compiler_options,
    find_compiler,
    source_digest,
)
from attention.kernels.cpu.instruction_set import INSTRUCTION_SETS, read_cpu_features

if TYPE_CHECKING:
    from attention.kernels.cpu.instruction_set import InstructionSet

__all__ = ["build_libraries", "find_library"]

_FOLDER = "prebuilt"


def find_library(source: Path) -> Path | None:
    """Return the library of a source with the most instructions of this CPU, or None."""
    if not (folder := source.parent / _FOLDER).is_dir():
        return None
    features = frozenset(read_cpu_features().decode().split())
    names = (_name(source, one) for one in INSTRUCTION_SETS if one.features <= features)
    return next((folder / name for name in names if (folder / name).is_file()), None)


def build_libraries(sources: Path) -> int:
    """Compile all C sources of a folder for each instruction set, and return how many.

    Raises the errors of `compile_library`.
    """
    compiler = find_compiler()
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    if platform.machine() != "x86_64":
        return 0
    place = sources / _FOLDER
    place.mkdir(exist_ok=True)
    # Regardless of the umask, as for the libraries.
    place.chmod(0o755)
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = [
                pool.submit(
                    compile_library,
                    [compiler, str(source), *compiler_options(one.options)],
                    _name(source, one),
                    folder,
                    mode=0o755,
                )
                for one in INSTRUCTION_SETS
                for source in sources.glob("*.c")
            ]
        for one in made:
            one.result()
    finally:
        os.close(folder)
    return len(made)


def _name(source: Path, instruction_set: InstructionSet) -> str:
    # The digest of the current source, so that a library of another version is not found.
    digest = source_digest(source, compiler_options(instruction_set.options), b"")
    return f"{source.stem}-{instruction_set.name}-{digest}.so"


if __name__ == "__main__":
    print(f"Compiled {build_libraries(Path(__file__).parent)} libraries.", file=sys.stderr)
