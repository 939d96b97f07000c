"""What the process that starts Ray finds out before it does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

PROGRAM = """
import sys
from cluster.engine.engine_options import EngineOptions, engine_config
from cluster.engine.ray_connection import RayConnection
from pagedray.errors import DeviceError

options = EngineOptions(device="cuda", tensor_parallel_size=2)
config = engine_config("examples/tiny-llama", options, lambda what, fraction: None)
try:
    RayConnection(config, lambda what, fraction: None)
except DeviceError as error:
    print(error, "torch" in sys.modules)
"""

STARTED = """
import psutil, ray
from ray._private import services, utils
from ray._raylet import GcsClient
from cluster.engine.engine_options import EngineOptions, engine_config
from cluster.engine.ray_connection import RayConnection

def look_up(address, node_id):
    nodes = GcsClient(address=address).get_all_node_info()
    print(any(node.hex() == node_id for node in nodes))
    return get_node(address, node_id)

node_class, dashboard_error = ray._private.node.Node, utils.get_dashboard_dependency_error
python_command = services._build_python_executable_command_memory_profileable
get_node, services.get_node = services.get_node, look_up
config = engine_config("examples/tiny-llama", EngineOptions(), lambda what, fraction: None)
connection = RayConnection(config, lambda what, fraction: None)
print(ray.cluster_resources()["node:__internal_head__"], ray._private.node.Node is node_class)
is_command_as_before = (
    services._build_python_executable_command_memory_profileable is python_command
)
print(utils.get_dashboard_dependency_error is dashboard_error and is_command_as_before)
for process in psutil.Process().children(recursive=True):
    print(process.cmdline())
connection.close()
"""


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="needs fewer than two CUDA devices")
def test_gpus_are_counted_without_torch() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    ).stdout
    number = torch.cuda.device_count()
    assert found == (f"tensor_parallel_size 2 needs 2 GPUs, but this machine has {number}. False\n")


def test_ray_is_started_without_a_dashboard() -> None:
    names = {"RAY_ADDRESS", "RAY_AUTH_MODE"}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    is_known, head, is_as_before, *processes = subprocess.run(
        [sys.executable, "-c", STARTED],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    # When Ray first looks the node up; it would look again after a second.
    assert is_known == "True"
    assert head == "1.0 True"
    assert is_as_before == "True"
    running = "\n".join(processes)
    assert "gcs_server" in running
    assert "raylet" in running
    # Of the API server, of the autoscaler, and of what sends logs to this process.
    for program in ("dashboard.py", "monitor.py"):
        assert program not in running
    # The agent of the raylet, which serves no dashboard either.
    assert "--minimal" in running
