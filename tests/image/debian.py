"""The machine that builds and runs the image: Debian, as root."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["DebianError", "install_packages", "read_release"]

_PROGRAMS = {
    "buildah": "buildah",
    "runc": "runc",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "unshare": "util-linux",
}
"""The package of each program that the tests use."""
_PROFILE = Path("/usr/share/containers/seccomp.json")
_PROFILE_PACKAGE = "golang-github-containers-common"


class DebianError(Exception):
    """The image cannot be built and run on this machine."""


def read_release() -> str:
    """Return the code name of this machine's release of Debian. Raises DebianError."""
    if os.geteuid() != 0:
        raise DebianError("make image-test needs root: it mounts, and makes network namespaces.")
    values = _os_release()
    if values.get("ID") != "debian":
        raise DebianError("make image-test needs Debian, for debootstrap and buildah.")
    return values["VERSION_CODENAME"]


def install_packages() -> None:
    """Install the packages of the programs that are missing."""
    missing = [package for name, package in _PROGRAMS.items() if shutil.which(name) is None]
    if not _PROFILE.exists():
        missing.append(_PROFILE_PACKAGE)
    if not missing:
        return
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
        done = subprocess.run(
            ["apt-get", "--quiet", *command],
            env=environment,
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise DebianError(f"apt-get {command[0]} failed:\n{done.stderr}")


def _os_release() -> dict[str, str]:
    path = Path("/etc/os-release")
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = (line.split("=", 1) for line in lines if "=" in line)
    return {name: value.strip('"') for name, value in pairs}
