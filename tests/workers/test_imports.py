"""What a rank imports before its first step."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.system.server_process import ROOT

KEYS = """
import sys
from triton.runtime.jit import JITFunction
from attention.kernels.triton.cache_keys import fix_cache_keys
fix_cache_keys()
modules = [sys.modules[name] for name in sorted(sys.modules) if ".kernels.triton." in name]
kernels = [one for m in modules for one in vars(m).values() if isinstance(one, JITFunction)]
print(len(kernels), sum(kernel.hash is not None for kernel in kernels))
"""


def test_every_kernel_has_its_key_before_one_is_used() -> None:
    # Where Triton interprets kernels they have no keys.
    environment = {name: it for name, it in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", KEYS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    num_kernels, num_keys = map(int, done.stdout.split())
    assert num_kernels > 30
    assert num_keys == num_kernels
