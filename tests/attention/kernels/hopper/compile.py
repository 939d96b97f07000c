"""Compiles our Triton kernels for a Hopper GPU, on a machine that need not have one.

    python -m tests.attention.kernels.hopper.compile

Prints a line of JSON for each kernel that the cases of `launches` launch: the case, the kernel, and
its shared memory, registers and bytes of spilled registers. Launches only compile. A tensor on the
CPU says that it is on a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Triton decides when it is imported whether it interprets kernels.
os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver, jit

HOPPER = GPUTarget("cuda", 90, 32)
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class HopperDriver:
    """What Triton asks of a driver before it launches."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        assert device == 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compilations:
    """Keeps the kernels of the launches of a case, which it compiles and does not launch."""

    def __init__(self) -> None:
        self._run = jit.JITFunction.run
        self._found: list[tuple[str, CompiledKernel]] = []

    def install(self) -> None:
        driver.set_active(HopperDriver())
        found, run = self._found, self._run

        # Any: arguments of any kernel.
        def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            found.append((self.__name__, run(self, *args, grid=grid, warmup=True, **options)))

        jit.JITFunction.run = compiled

    def take(self) -> dict[str, CompiledKernel]:
        """Return the kernels since the last call, by a name for each variant."""
        kernels = {f"{name} {kernel.hash[:8]}": kernel for name, kernel in self._found}
        self._found.clear()
        return kernels


def resources(kernel: CompiledKernel) -> dict[str, int]:
    """Return bytes of shared memory, registers of a thread, and bytes that it spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        text = subprocess.run(
            [_CUOBJDUMP, "--dump-resource-usage", file.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    fields = dict(part.split(":", 1) for part in text.split() if part.count(":") == 1)
    return {
        "shared": kernel.metadata.shared,
        "registers": int(fields["REG"]),
        "spilled": int(fields["LOCAL"]) + int(fields["STACK"]),
    }


def main() -> int:
    """Compile all cases, or those whose names are given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="a name in `launches` (all)")
    cases = parser.parse_args().cases
    compilations = Compilations()
    compilations.install()
    from attention.kernels.triton import kernel_launcher

    # Before other modules import it.
    kernel_launcher.can_depend = lambda device: True  # type: ignore[assignment]
    from tests.attention.kernels.hopper.launches import LAUNCHES

    for case in cases or LAUNCHES:
        LAUNCHES[case]()
        for name, kernel in compilations.take().items():
            print(json.dumps({"case": case, "kernel": name, **resources(kernel)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
