"""`pagedray deploy fetch`: the Job that downloads a model, and the pods that wait for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from cluster.cli.deploy.fetch import fetch, wait_for_model
from pagedray.errors import CheckpointError
from tests.small_hub import Fault, SmallHub, folder_files
from tests.system.server_process import TINY_LLAMA
from workers.hub.settings import HubSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
    waiting.join(10.0)
    assert not waiting.is_alive()


def test_who_waits_sends_nothing(hub: SmallHub, settings: HubSettings) -> None:
    folder = fetch("org/tiny", settings)
    hub.requested.clear()
    assert wait_for_model("org/tiny", settings) == folder
    assert not hub.requested


def test_a_folder_is_not_downloaded(settings: HubSettings) -> None:
    with pytest.raises(CheckpointError, match="only models on the Hub"):
        fetch(str(TINY_LLAMA), settings)
