"""Prints the versions of the CUDA image: the file deploy/constraints-cuda.txt.

Run it in the root of a checkout with any Python that has pip:

    python deploy/image/constraints_cuda.py > deploy/constraints-cuda.txt

Torch and the kernel libraries have the versions that were benchmarked on GPUs. All other versions
come from constraints.txt, or are what these libraries require.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

_MEASURED = ("torch==2.11.0", "flashinfer-python==0.7.2.post1", "xformers==0.0.35")
# Torch 2.11 requires its own Triton and an older setuptools.
_FOLLOWS_TORCH = ("torch==", "triton==", "setuptools==")
_PYTHON = "3.12"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    shared = [
        line
        for line in Path("constraints.txt").read_text().splitlines()
        if line and not line.startswith(("#", *_FOLLOWS_TORCH))
    ]
    needed = subprocess.run(
        [sys.executable, "deploy/image/requirements.py", "gpu", "tracing"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("\n".join((*shared, *_MEASURED)))
        requirements = Path(folder, "requirements.txt")
        requirements.write_text(needed)
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        command += ["--ignore-installed", "--target", folder, "--report", str(report)]
        command += ["--python-version", _PYTHON, "--only-binary", ":all:"]
        command += ["--constraint", str(constraints), "--requirement", str(requirements)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    print("# The versions of the CUDA image, on Python " + _PYTHON + ". To renew them:")
    print("# python deploy/image/constraints_cuda.py > deploy/constraints-cuda.txt")
    for name, version in sorted((one["name"].lower(), one["version"]) for one in found):
        # Without local version labels, which PyPI does not have.
        print(f"{name.replace('_', '-')}=={version.split('+')[0]}")


if __name__ == "__main__":
    main()
