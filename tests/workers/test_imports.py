"""What a rank imports before its first step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.server_process import ROOT

KEYS = """
import sys
from triton.runtime.jit import JITFunction
from attention.kernels.triton.kernel_launcher import fix_kernel_keys
fix_kernel_keys()
modules = [sys.modules[name] for name in sorted(sys.modules) if ".kernels.triton." in name]
kernels = [one for m in modules for one in vars(m).values() if isinstance(one, JITFunction)]
print(len(kernels), sum(kernel.hash is not None for kernel in kernels))
"""

IMPORTS = """
import sys
from contextlib import suppress
from cluster.engine.engine_options import EngineOptions, engine_config
from pagedray.errors import DeviceError
from pagedray.rank_progress import ProgressWord
from workers.rank_lifecycle import RankLifecycle

options = EngineOptions(device="cuda", num_blocks=8)
rank = RankLifecycle(engine_config("examples/tiny-llama", options), ProgressWord())
# Without a device, its imports are all that it does.
with suppress(DeviceError):
    rank.load(0, 0, None, None)
print("attention.gpu.shared_kernels" in sys.modules, "flashinfer" in sys.modules)
rank.import_libraries()
print("flashinfer" in sys.modules)
"""
DECODE = "BatchDecodeWithPagedKVCacheWrapper = fast_decode_plan = None"
PREFILL = "BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithRaggedKVCacheWrapper = None"


@pytest.mark.slow
def test_libraries_that_a_model_may_not_need_are_imported_by_spares(tmp_path: Path) -> None:
    library = tmp_path / "flashinfer"
    library.mkdir()
    for name, text in {"__init__": "", "decode": DECODE, "prefill": PREFILL}.items():
        (library / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False", "True"]


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
