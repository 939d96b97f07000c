"""What the process that starts Ray finds out before it does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

PROGRAM = """
import sys
from cluster.engine.options import EngineOptions, engine_config
from cluster.engine.ray_cluster.ray_connection import RayConnection
from pagedray.errors import DeviceError

options = EngineOptions(device="cuda", tensor_parallel_size=2)
config = engine_config("examples/tiny-llama", options, lambda what, fraction: None)
try:
    RayConnection(config, lambda what, fraction: None)
except DeviceError as error:
    print(error, "torch" in sys.modules)
"""


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="needs fewer than two CUDA devices")
def test_gpus_are_counted_without_torch() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    ).stdout
    number = torch.cuda.device_count()
    assert found == (f"tensor_parallel_size 2 needs 2 GPUs, but this machine has {number}. False\n")
