"""`pagedray collect-env`: information about a machine for bug reports."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cluster.cli.server_connection import ServerConnection
from pagedray.errors import PagedRayError
from pagedray.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["print_environment"]

_PACKAGES = (
    *("torch", "ray", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy"),
    *("triton", "flashinfer-python", "xformers", "grpcio", "protobuf", "msgspec", "starlette"),
)
_PREFIXES = ("CUDA_", "HF_", "LD_LIBRARY_PATH", "NCCL_", "NVIDIA_", "OMP_", "PAGEDRAY_", "RAY_")
_SECRETS = ("KEY", "PASSWORD", "SECRET", "TOKEN")
_GPU_FIELDS = "name,memory.total,driver_version,compute_cap"
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
_TIMEOUT_S = 20.0


def print_environment(url: str, *, key: str | None, ca_file: Path | None) -> int:
    """Print versions, hardware and settings, and the options of the server at `url` if it runs."""
    sections = (
        ("versions", _versions()),
        ("machine", _machine()),
        ("GPUs", _gpus()),
        ("environment variables", _variables()),
        (f"server at {url}", _server(url, key, ca_file)),
    )
    for title, lines in sections:
        print(f"{title}:")
        for name, value in lines:
            print(f"  {name}: {value}")
    return 0


def _versions() -> Iterator[tuple[str, object]]:
    yield "pagedray", __version__
    yield "python", f"{platform.python_version()} ({sys.executable})"
    for name in _PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"
    # Of the builds of a version, the package does not name the CUDA version.
    import torch

    yield "CUDA of torch", torch.version.cuda or "none"
    yield "CUDA is available", torch.cuda.is_available()


def _machine() -> Iterator[tuple[str, object]]:
    yield "system", platform.platform()
    info = _fields("/proc/cpuinfo")
    features = [name for name in _CPU_FEATURES if name in info.get("flags", "").split()]
    yield "CPU", f"{info.get('model name', platform.processor())} ({' '.join(features)})"
    yield "cores for this process", len(os.sched_getaffinity(0))
    memory = _fields("/proc/meminfo")
    yield "memory", f"{memory.get('MemTotal', '?')}, available {memory.get('MemAvailable', '?')}"
    disk = shutil.disk_usage("/dev/shm")
    yield "/dev/shm", f"{disk.total // 2**20} MiB, free {disk.free // 2**20} MiB"


def _gpus() -> Iterator[tuple[str, object]]:
    command = ["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield "nvidia-smi", getattr(error, "strerror", None) or "it did not respond"
        return
    if done.returncode:
        yield "nvidia-smi", " ".join((done.stdout + done.stderr).split())
        return
    for number, line in enumerate(done.stdout.splitlines()):
        yield f"GPU {number} ({_GPU_FIELDS})", line


def _variables() -> Iterator[tuple[str, object]]:
    for name, value in sorted(os.environ.items()):
        if name.startswith(_PREFIXES):
            yield name, "(set)" if any(one in name for one in _SECRETS) else value


def _server(url: str, key: str | None, ca_file: Path | None) -> Iterator[tuple[str, object]]:
    try:
        server = ServerConnection(url, key=key, ca_file=ca_file, kind="a PagedRay server")
        found = server.get("/server_info", dict[str, object])
        server.close()
    except PagedRayError as error:
        yield "no information", error
        return
    for name, value in found.items():
        yield name, value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _fields(path: str) -> dict[str, str]:
    """Return the first value of each field of a file of the kernel."""
    found: dict[str, str] = {}
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found
