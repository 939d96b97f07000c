"""Build the CPU image and run it as the manifests of `cpu-demo` say: `make image-test`.

The image is built with the machine's network. It runs in namespaces without one, which end with
the tests.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from tests.image.base_image import make_base
from tests.image.built_image import build_image
from tests.image.debian import DebianError, install_packages, read_release
from tests.image.ray_cluster import IMAGE
from tests.image.storage import FOLDER

_ROOT = Path(__file__).resolve().parents[2]
_NAMESPACES = ("--mount", "--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")


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
