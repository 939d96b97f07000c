"""`pagedray deploy fetch`: the Job that downloads a model, and the pods that wait for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from cluster.cli.commands import main
from cluster.cli.deploy import fetch, wait_for_mirror, wait_for_model
from pagedray.errors import CheckpointError
from tests.downloads.faulty_server import Fault
from tests.downloads.small_hub import SmallHub, folder_files
from tests.system.server_process import TINY_LLAMA
from workers.hub.mirror import Mirror, RemoteFile
from workers.hub.model_name import HubSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.downloads.small_s3 import SmallS3

_WEIGHTS = "model.safetensors"


@pytest.fixture
def hub() -> Iterator[SmallHub]:
    with SmallHub() as hub:
        hub.push("org/tiny", folder_files(TINY_LLAMA))
        yield hub


@pytest.fixture
def settings(hub: SmallHub, tmp_path: Path) -> HubSettings:
    return HubSettings(endpoint=hub.url, cache=tmp_path / "cache", retry_s=0.01)


def test_a_job_that_runs_again_downloads_nothing(hub: SmallHub, settings: HubSettings) -> None:
    folder = fetch("org/tiny", settings)
    assert (folder / _WEIGHTS).read_bytes() == (TINY_LLAMA / _WEIGHTS).read_bytes()
    hub.requested.clear()
    assert fetch("org/tiny", settings) == folder
    assert not hub.gets_of(_WEIGHTS)


def test_all_shards_of_a_gguf_file_are_downloaded(hub: SmallHub, settings: HubSettings) -> None:
    shards = {f"tiny-Q8_0-0000{number}-of-00002.gguf": bytes([number]) for number in (1, 2)}
    hub.push("org/tiny-GGUF", {**shards, "tiny-Q4_0.gguf": b"other", "README.md": b""})
    path = fetch("org/tiny-GGUF:Q8_0", settings)
    assert path.name == "tiny-Q8_0-00001-of-00002.gguf"
    assert {name: path.with_name(name).read_bytes() for name in shards} == shards
    assert not hub.gets_of("tiny-Q4_0.gguf")
    assert wait_for_model("org/tiny-GGUF:Q8_0", settings) == path
    with pytest.raises(CheckpointError, match="needs the name of one GGUF file"):
        fetch("org/tiny-GGUF", settings)


@pytest.mark.parametrize(
    "fault",
    [Fault(_WEIGHTS, flips_byte=True), Fault(_WEIGHTS, times=20, status=403)],
    ids=["changed", "forbidden"],
)
def test_a_folder_that_is_not_complete_is_never_served(
    hub: SmallHub, settings: HubSettings, fault: Fault
) -> None:
    hub.faults.append(fault)
    with pytest.raises(CheckpointError) as caught:
        fetch("org/tiny", settings)
    assert "\n" not in str(caught.value)
    waiting = threading.Thread(
        target=wait_for_model, args=("org/tiny", settings, 0.01), daemon=True
    )
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    hub.faults.clear()
    fetch("org/tiny", settings)
    waiting.join(60.0)
    assert not waiting.is_alive()


def test_who_waits_sends_nothing(hub: SmallHub, settings: HubSettings) -> None:
    folder = fetch("org/tiny", settings)
    hub.requested.clear()
    assert wait_for_model("org/tiny", settings) == folder
    assert not hub.requested


def test_pods_wait_for_the_last_file_of_s3(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path)
    files = [RemoteFile(name=name, size=2, etag="e") for name in ("config.json", _WEIGHTS)]
    waiting = threading.Thread(target=wait_for_mirror, args=(tmp_path, 0.01), daemon=True)
    waiting.start()
    with mirror.locked():
        mirror.begin()
        for file in files:
            mirror.append(file, b"{}")
            mirror.accept(file)
        waiting.join(0.1)
        # All files are there, and the download has not said that these are all.
        assert waiting.is_alive()
        mirror.finish(files)
    waiting.join(60.0)
    assert not waiting.is_alive()


def test_a_job_that_fails_ends_in_one_line_and_the_next_one_continues(
    small_s3: SmallS3, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_s3.push("tiny", folder_files(TINY_LLAMA))
    small_s3.faults.append(Fault(_WEIGHTS, status=403))
    command = ["deploy", "fetch", "s3://models/tiny", "--folder", str(tmp_path / "tiny")]
    assert main(command) != 0
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("pagedray: error: S3 denies access to s3://models/tiny (403)")
    assert Mirror(tmp_path / "tiny").problem() is not None
    assert main(command) == 0
    assert main([*command, "--wait"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'tiny'}\n" * 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["s3://models/tiny"], "A model on S3 requires --folder"),
        (["org/tiny", "--folder", "/tmp/x"], "--folder is for models on S3"),
        (["s3://Models/tiny", "--folder", "/tmp/x"], "is not a folder in S3"),
        (["s3://Models/tiny", "--folder", "/tmp/x", "--wait"], "is not a folder in S3"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    assert main(["deploy", "fetch", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert error in line


@pytest.mark.parametrize("run", [fetch, wait_for_model])
@pytest.mark.parametrize(
    ("model", "error"),
    [(str(TINY_LLAMA), "only models on the Hub"), ("org/tiny@", "names an invalid revision")],
)
def test_what_is_not_on_the_hub_is_rejected(
    settings: HubSettings, run: Callable[[str, HubSettings], Path], model: str, error: str
) -> None:
    with pytest.raises(CheckpointError, match=error):
        run(model, settings)
