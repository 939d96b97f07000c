"""Settings of the attention tests."""

from collections.abc import Iterator

import pytest
import torch

from tests.attention.rig import Rig


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
