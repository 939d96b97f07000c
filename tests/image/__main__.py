"""Build the CPU image and run it as the manifests of `cpu-demo` say: `make image-test`.

The image is built with the machine's network. It runs in namespaces without one, which end with
the tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.image.base_image import FOLDER, make_base
from tests.image.built_image import build_image
from tests.image.ray_cluster import IMAGE

_ROOT = Path(__file__).resolve().parents[2]
_NAMESPACES = ("--mount", "--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")

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


def main() -> int:
    """Build the image and run the tests; return their exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.image",
        usage="%(prog)s [-h] [options of pytest ...]",
        description=__doc__.splitlines()[0] if __doc__ else None,
    )
    _, pytest_options = parser.parse_known_args()
    try:
        release = read_release()
        install_packages()
    except DebianError as error:
        print(error, file=sys.stderr)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    print(f"Base: Debian {release}", flush=True)
    make_base(release)
    print(f"Building {IMAGE} ({time.monotonic() - started_s:.0f} s)", flush=True)
    build_image(IMAGE)
    print(f"Built ({time.monotonic() - started_s:.0f} s)", flush=True)
    tests = [sys.executable, "-m", "pytest", "-m", "image", "tests/image", *pytest_options]
    return subprocess.run(["unshare", *_NAMESPACES, *tests], cwd=_ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())


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
