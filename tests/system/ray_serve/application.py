"""The application that the tests deploy, and what its replicas log."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import yaml

PROMPT = "def read_config(path):\n"
LEASE_S = 6.0
_CONFIG = """
applications:
  - name: default
    route_prefix: /
    import_path: pagedray:build_app
    args: {arguments}
    deployments:
      - name: PagedRay
        health_check_period_s: 1.0
"""


# Any: a configuration of Ray Serve.
def serve_config(arguments: Mapping[str, object]) -> dict[str, Any]:
    """Return the config file of an application with these arguments."""
    config: dict[str, Any] = yaml.safe_load(_CONFIG.format(arguments=json.dumps(arguments)))
    return config


# Any: fields of all types.
def logged(message: str) -> list[dict[str, Any]]:
    """Return the lines of a message in the logs of all replicas."""
    node: Any = ray._private.worker._global_node  # Any: Ray's own
    lines = (
        json.loads(line)
        for path in Path(node.get_logs_dir_path()).glob("worker-*.err")
        for line in path.read_text().splitlines()
        if line.startswith("{")
    )
    return [one for one in lines if one["message"] == message]
