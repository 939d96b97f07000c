"""Settings of the tests of kernels: Triton runs them on the CPU where there is no GPU."""

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_triton_*.py"]


@pytest.fixture(autouse=True)
def _each_way_of_decodes() -> None:
    """Replace the fixture that runs each test twice: these kernels have one way."""
