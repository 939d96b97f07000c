"""The profile `RuntimeDefault` of seccomp, for a container without capabilities.

The file of Debian's container tools names capabilities and architectures on which its rules depend;
the runtime wants the rules that apply.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

__all__ = ["default_profile"]

_FILE = Path("/usr/share/containers/seccomp.json")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_OF_RUNTIME = ("names", "action", "args", "errnoRet")


# Any: JSON.
def default_profile() -> dict[str, Any]:
    """Return the value of `linux.seccomp` of a container."""
    profile = json.loads(_FILE.read_text())
    machine = platform.machine()
    return {
        "defaultAction": profile["defaultAction"],
        "defaultErrnoRet": profile["defaultErrnoRet"],
        "architectures": [f"SCMP_ARCH_{machine.upper()}"],
        "syscalls": [
            {key: rule[key] for key in _OF_RUNTIME if rule.get(key) is not None}
            for rule in profile["syscalls"]
            if _applies(rule, _ARCHITECTURES[machine])
        ],
    }


# Any: JSON.
def _applies(rule: dict[str, Any], architecture: str) -> bool:
    includes = rule.get("includes", {})
    if includes.get("caps"):
        return False
    architectures = includes.get("arches")
    return not architectures or architecture in architectures
