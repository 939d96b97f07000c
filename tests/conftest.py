"""What all tests share: one Ray cluster for each process that runs tests."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.util
import os
import re
import secrets
import signal
import sys
from typing import Any

# Before torch is imported anywhere. Threads that spin while they wait take the cores from the
# other processes that run tests.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# NumPy's threads always do; half of the time of kernels in Triton's interpreter would be theirs.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

from collections.abc import Generator, Iterator
from pathlib import Path

import certifi
import httpx
import pytest
import torch

from attention.kernels.cpu import native
from cluster.engine import frozen_heap
from tests.downloads.small_s3 import SmallS3
from tests.shared_ray import SharedRay

# Before Ray is imported anywhere: no token is written to HOME, no usage is reported.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_WORKER_NICENESS"] = "0"
# Before gRPC starts threads: a child that a test forks beside them may hang in gRPC's handlers.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
# Reading the public certificate authorities, which no test needs, would take an HTTP client 20 ms.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.devnull
# The default timeout of the client's library, five seconds, is too short on a busy machine.
timeouts = httpx._config.DEFAULT_TIMEOUT_CONFIG
timeouts.connect = timeouts.read = timeouts.write = timeouts.pool = 60.0
# Triton decides when it is imported, by whomever, whether it runs kernels on the CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # No test fails because the machine is busy.
    settings.register_profile(
        "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("untimed")


_RAY_FILES = (
    "tests/system/faults/test_rank_death.py",
    "tests/system/faults/test_ray_cluster.py",
    "tests/system/test_serve_demo.py",
)
"""Files with tests that start the shared Ray cluster and are not slow."""
_NEW_KEY = re.compile(r"pr-[\w-]{40,}|[0-9a-f]{64}")
"""An API key, or the hash of one."""


# Any: the parameter of a test.
def pytest_make_parametrize_id(val: Any) -> str | None:
    """Name tests alike in every process that runs some of them: their API keys differ."""
    if isinstance(val, str) and _NEW_KEY.search(val):
        return _NEW_KEY.sub("KEY", val).encode("unicode_escape").decode()
    return None


# Any: xdist has no types.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let `--dist loadfile` give all files that need the Ray cluster to one process."""
    from xdist.scheduler import LoadFileScheduling

    class RayTogether(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "ray" if file in _RAY_FILES else file

    return RayTogether(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_runtest_setup() -> None:
    """Let SIGTERM end a run as Ctrl-C does: tests end the processes that they started."""
    # For each test, since servers in this process and Ray set handlers of their own.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the modules and the tests, millions of objects, out of all garbage collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # Python's default takes 4 % of the time of tests of the frontends.
        gc.set_threshold(5_000)
        gc.enable()
        # At the end, libraries check for objects that they have leaked.
        atexit.register(gc.unfreeze)


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _uncounted_heap() -> Iterator[None]:
    """Tell engines that the heap is frozen: to count its objects would take each 0.2 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frozen_heap, "_is_frozen", lambda: True)
        yield


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # Modules of tests with kernels have imported it.
        if "triton" in sys.modules:
            from tests.quick_interpreter import quicken_interpreter

            quicken_interpreter(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _kernels_compile() -> Iterator[None]:
    """Fail tests that would pass without a kernel in C since its source does not compile."""
    load, folder = native._loaded, Path(native.__file__).parent

    def loaded(command: list[str], name: str) -> ctypes.CDLL:
        try:
            return load(command, name)
        except (OSError, native.CompilationError) as error:
            if Path(command[1]).parent != folder:
                raise
            raise AssertionError(f"{name} cannot be compiled or loaded") from error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_loaded", loaded)
        yield


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray cluster that every test of the process shares."""
    import logging

    import ray

    with SharedRay() as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.WARNING)
        yield
        ray.shutdown()


@pytest.fixture
def small_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallS3]:
    """A local S3, which the environment leads to, with credentials."""
    with SmallS3() as s3:
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
        # The library refuses to start without authorities, which are removed above.
        monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield s3
