"""A model whose weights are finite and whose logits are not: the server is not ready, and ends."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.fakes import wait_for
from tests.system.server_process import TINY_LLAMA, ServerProcess


@pytest.fixture
def overflowing_model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(TINY_LLAMA, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_server_without_finite_logits_is_not_ready(overflowing_model: Path) -> None:
    with ServerProcess(("--executor=local",), folder=overflowing_model) as server:
        assert httpx.get(f"{server.url}/ready").status_code == 200
        for number in range(3):
            body = {"model": "model", "prompt": f"Request {number}", "max_tokens": 5}
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60.0)
        wait_for(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        # Alive, until a supervisor has seen that it is not ready.
        assert httpx.get(f"{server.url}/health").status_code == 200
        metrics = server.metrics()
        assert metrics["pagedray_healthy"] == 0.0
        assert metrics["pagedray_nonfinite_sequences_total"] >= 4.0


@pytest.mark.slow
def test_it_ends_for_its_supervisor(overflowing_model: Path) -> None:
    with ServerProcess(("--executor=local",), folder=overflowing_model) as server:
        for number in range(3):
            body = {"model": "model", "prompt": f"Request {number}", "max_tokens": 5}
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60.0)
        assert server.wait(60.0) == 1
