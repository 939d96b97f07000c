"""Settings of the attention tests."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from tests.attention.rig import Rig


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("triton"):
            from tests.attention.quick_interpreter import patch_builtin

            patch.setattr("triton.runtime.interpreter._patch_builtin", patch_builtin)
        yield


@pytest.fixture(params=["kernel", "torch"])
def both_decodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test twice: decodes by the kernel in C, and through torch."""
    monkeypatch.setattr(Rig, "uses_kernel", request.param == "kernel")


@pytest.fixture(autouse=True)
def _one_thread_without_gradients() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(num_threads)
