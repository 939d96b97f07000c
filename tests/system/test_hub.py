"""A Hub id in place of a folder: the command line, and ranks on Ray."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.downloads.faulty_server import Fault
from tests.downloads.small_hub import SmallHub, folder_files
from tests.system.server_process import TINY_LLAMA, ServerProcess, run_pagedray

WEIGHTS = "model.safetensors"
GATED = {"X-Error-Code": "GatedRepo"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    with SmallHub() as hub:
        hub.push("org/tiny", folder_files(TINY_LLAMA))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        yield hub


@pytest.mark.slow
def test_command_generates_with_a_model_of_the_hub(hub: SmallHub) -> None:
    arguments = ("generate", "--device=cpu", "--max-tokens=2", "org/tiny", "import")
    done = run_pagedray(*arguments)
    assert (done.code, done.out[:6]) == (0, "import"), done.err
    assert "Downloading org/tiny ...\n" in done.err
    assert len(hub.gets_of(WEIGHTS)) == 1


def test_unknown_model_ends_the_command_with_one_line(hub: SmallHub) -> None:
    done = run_pagedray("serve", "org/none", "--device=cpu")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("pagedray: error: org/none is neither a folder nor a model on")
    assert len(done.err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "fault", "expected"),
    [
        ("org/tiny@v9", None, "org/tiny has no revision v9 on"),
        ("org/tiny", Fault("/api/", 9, status=403, headers=GATED), "org/tiny is gated (403):"),
        ("org/tiny", Fault("/api/", 9, status=500), "org/tiny is not a folder, and cannot be"),
    ],
)
def test_fault_of_the_hub_ends_the_command_with_one_line(
    hub: SmallHub, model: str, fault: Fault | None, expected: str
) -> None:
    hub.faults += [] if fault is None else [fault]
    done = run_pagedray("serve", model, "--device=cpu")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"pagedray: error: {expected}")
    assert len(done.err.splitlines()) == 1


@pytest.mark.slow
def test_ranks_on_ray_download_the_weights_once(hub: SmallHub) -> None:
    arguments = ("--tensor-parallel-size=2", "--num-blocks=64")
    with ServerProcess(arguments, folder=Path("org/tiny@main")) as server:
        models = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["org/tiny"]
        assert httpx.get(f"{server.url}/v1/models/org/tiny").status_code == 200
        body = {"model": "org/tiny", "prompt": "import", "max_tokens": 2}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60.0)
        assert answer.json()["usage"]["completion_tokens"] == 2
    assert len(hub.gets_of(WEIGHTS)) == 1
