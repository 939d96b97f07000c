"""Models on a small Hub: what is downloaded, what the cache answers, and each fault's one line."""

import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch

from cluster.engine.engine_options import EngineOptions, engine_config
from pagedray.config import EngineConfig
from pagedray.errors import CheckpointError
from pagedray.model_config import HubRevision
from tests.downloads.faulty_server import Fault
from tests.downloads.small_hub import SmallHub, folder_files
from tests.system.server_process import TINY_LLAMA
from workers.hub.fetch import Snapshot, fetch_files, fetch_header, find_revision
from workers.hub.locate import check_weights_listed, hub_dtype, locate_model, with_local_weights
from workers.hub.model_name import HubName, HubSettings
from workers.models.families.registry import read_model_config
from workers.weights.tensor_entries import read_entries

NAME = HubName("org/tiny", "main")
WEIGHTS = "model.safetensors"
GATED = {"X-Error-Code": "GatedRepo"}
ROOT = Path(__file__).parents[3]
_NOBODY = 65534


@pytest.fixture
def hub() -> Iterator[SmallHub]:
    with SmallHub() as hub:
        more = {"pytorch_model.bin": b"pickle", "original/consolidated.pth": b"pickle"}
        hub.push("org/tiny", folder_files(TINY_LLAMA) | more)
        yield hub


@pytest.fixture
def settings(hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubSettings:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "")
    return HubSettings(endpoint=hub.url, cache=tmp_path / "cache", retry_s=0.01)


def fetched(settings: HubSettings, *more: str) -> tuple[HubRevision, Path]:
    located = locate_model("org/tiny", settings=settings)
    assert located.hub is not None
    return located.hub, fetch_files(located.hub, more, settings=settings)


def unreachable(settings: HubSettings) -> HubSettings:
    return replace(settings, endpoint="http://127.0.0.1:9")


def error_of(settings: HubSettings, model: str = "org/tiny") -> str:
    started_s = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        locate_model(model, settings=settings)
    assert time.monotonic() - started_s < 60.0
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_dtype_that_is_not_declared_is_read_from_the_header_on_the_hub(
    dtype: str, hub: SmallHub, settings: HubSettings
) -> None:
    values = json.loads((TINY_LLAMA / "config.json").read_text())
    values.pop("torch_dtype", None)
    values.pop("dtype", None)
    tensors = {"model.norm.weight": torch.ones(2**17, dtype=getattr(torch, dtype))}
    files = {"config.json": json.dumps(values).encode(), WEIGHTS: safetensors.torch.save(tensors)}
    hub.push("org/tiny", folder_files(TINY_LLAMA) | files)
    revision, folder = fetched(settings)
    read = partial(hub_dtype, revision, settings=settings)
    assert read_model_config(folder, stored_dtype=read).dtype == dtype
    (get,) = hub.gets_of(WEIGHTS)
    assert get.range == "bytes=0-100000"
    fetch_files(revision, [WEIGHTS], settings=settings)
    assert read_model_config(folder).dtype == dtype


def test_a_header_that_the_hub_does_not_send_is_one_line(
    hub: SmallHub, settings: HubSettings
) -> None:
    revision, _ = fetched(settings)
    with pytest.raises(CheckpointError, match="cannot be downloaded") as caught:
        fetch_header(revision, WEIGHTS, unreachable(settings))
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} of .* is not in the cache"):
        fetch_header(revision, WEIGHTS, replace(settings, is_offline=True))


def test_download_dir_is_the_cache_of_every_process(
    settings: HubSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert HubSettings.from_environment(Path("folder")).cache == Path("folder")
    monkeypatch.setattr(
        HubSettings,
        "from_environment",
        lambda cache=None: replace(settings, cache=cache or settings.cache),
    )
    folder = tmp_path / "downloads"
    options = EngineOptions(download_dir=str(folder), revision="main", device="cpu")
    config = engine_config("org/tiny", options)
    assert config.model.folder.is_relative_to(folder / "models--org--tiny")
    local = with_local_weights(pickle.loads(pickle.dumps(config)), lambda *_: None)
    assert (local.model.folder / WEIGHTS).is_file()
    assert not settings.cache.exists()


def test_only_the_needed_files_are_downloaded(hub: SmallHub, settings: HubSettings) -> None:
    _, folder = fetched(settings, WEIGHTS)
    names = {path.name for path in folder.rglob("*")}
    assert names == {path.name for path in TINY_LLAMA.iterdir()} - {"README.md"}
    assert (folder / WEIGHTS).read_bytes() == (TINY_LLAMA / WEIGHTS).read_bytes()
    hub.requested.clear()
    fetched(settings, WEIGHTS)
    assert [each.path for each in hub.requested] == ["/api/models/org/tiny/revision/main"]


def test_the_linear_layers_of_an_embedding_model_are_downloaded(
    hub: SmallHub, settings: HubSettings
) -> None:
    linear = safetensors.torch.save({"linear.weight": torch.ones(2**8, 2**9)})
    more = {"2_Dense/config.json": b"{}", "2_Dense/model.safetensors": linear}
    hub.push("org/tiny", folder_files(TINY_LLAMA) | more | {"2_Dense/pytorch_model.bin": b"x"})
    _, folder = fetched(settings)
    assert (folder / "2_Dense" / "model.safetensors").is_symlink()
    assert read_entries(folder / "2_Dense")["linear.weight"].shape == (2**8, 2**9)
    assert not (folder / "2_Dense" / "pytorch_model.bin").exists()


def test_the_token_of_the_environment_is_sent(
    hub: SmallHub, settings: HubSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetched(settings)
    tokens = {each.token for each in hub.requested if "/org/tiny" in each.path}
    assert tokens == {"Bearer hf_secret"}


def test_weights_are_those_of_the_commit_that_was_found_first(
    hub: SmallHub, settings: HubSettings
) -> None:
    revision, folder = fetched(settings)
    hub.push("org/tiny", {"config.json": b"{}", WEIGHTS: b"other"})
    assert fetch_files(revision, [WEIGHTS], settings=settings) == folder
    assert (folder / WEIGHTS).read_bytes() == (TINY_LLAMA / WEIGHTS).read_bytes()
    assert find_revision(NAME, settings).commit != revision.commit
    pinned = HubName("org/tiny", revision.commit)
    assert find_revision(pinned, unreachable(settings)) == revision


def test_processes_of_a_node_download_once(hub: SmallHub, settings: HubSettings) -> None:
    hub.faults.append(Fault(WEIGHTS, cut_after=10))
    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(lambda _: fetched(settings, WEIGHTS)[1], range(3)))
    assert len(folders) == 1
    # The first one was cut.
    assert len(hub.gets_of(WEIGHTS)) == 2


def test_download_that_was_cut_continues(hub: SmallHub, settings: HubSettings) -> None:
    content = bytes(range(256)) * 45_000
    hub.push("org/tiny", folder_files(TINY_LLAMA) | {WEIGHTS: content})
    hub.faults.append(Fault(WEIGHTS, cut_after=11_000_000))
    reported: list[tuple[int, int]] = []
    revision, folder = fetched(settings)
    fetch_files(revision, [WEIGHTS], lambda *each: reported.append(each), settings)
    assert (folder / WEIGHTS).read_bytes() == content
    assert [each.range for each in hub.gets_of(WEIGHTS)] == [None, "bytes=10485760-"]
    assert reported[-1] == (len(content), len(content))


def start_download(settings: HubSettings) -> subprocess.Popen[bytes]:
    """Start a process that downloads all of the model."""
    program = f"""
from pathlib import Path
from workers.hub.fetch import fetch_files
from workers.hub.locate import locate_model
from workers.hub.model_name import HubSettings
settings = HubSettings(endpoint={settings.endpoint!r}, cache=Path({str(settings.cache)!r}))
located = locate_model("org/tiny", settings=settings)
fetch_files(located.hub, [{WEIGHTS!r}], settings=settings)
"""
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)


def test_processes_that_start_together_download_once(hub: SmallHub, settings: HubSettings) -> None:
    processes = [start_download(settings) for _ in range(2)]
    assert [process.wait(120.0) for process in processes] == [0, 0]
    assert len(hub.gets_of(WEIGHTS)) == 1
    assert len(hub.gets_of("config.json")) == 1
    _, folder = fetched(settings, WEIGHTS)
    assert (folder / WEIGHTS).read_bytes() == (TINY_LLAMA / WEIGHTS).read_bytes()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_download_of_a_killed_process_continues(
    hub: SmallHub, settings: HubSettings, is_damaged: bool
) -> None:
    content = bytes(range(256)) * 90_000
    hub.push("org/tiny", folder_files(TINY_LLAMA) | {WEIGHTS: content})
    is_over = threading.Event()
    hub.faults.append(Fault(WEIGHTS, stalls=is_over, stalls_after=21_000_000))
    process = start_download(settings)
    blobs = settings.cache / "models--org--tiny" / "blobs"
    name = f"{hashlib.sha256(content).hexdigest()}.*.incomplete"
    while not (parts := [part for part in blobs.glob(name) if part.stat().st_size]):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    is_over.set()
    (part,) = parts
    received = part.stat().st_size
    assert 0 < received < len(content)
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS} of org/tiny.* is not in the cache"):
        fetched(replace(settings, is_offline=True), WEIGHTS)
    if is_damaged:
        with part.open("r+b") as file:
            file.write(b"x")
    reported: list[tuple[int, int]] = []
    revision, folder = fetched(settings)
    fetch_files(revision, [WEIGHTS], lambda *each: reported.append(each), settings)
    assert (folder / WEIGHTS).read_bytes() == content
    ranges = [each.range for each in hub.gets_of(WEIGHTS)]
    assert ranges == [None, f"bytes={received}-", *([None] if is_damaged else [])]
    assert reported[-1] == (len(content), len(content))
    assert not list(blobs.glob("*.incomplete"))


@contextmanager
def without_rights(folder: Path) -> Iterator[None]:
    """Take the right to write in a folder from this process."""
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    for path in folders:
        path.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for path in folders:
            path.chmod(0o755)


@pytest.mark.parametrize("is_offline", [False, True])
def test_cache_that_cannot_be_written_is_read(
    hub: SmallHub, settings: HubSettings, is_offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library would read it from the home of another user.
    monkeypatch.setenv("HF_TOKEN", "hf_any")
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        local = replace(settings, cache=Path(name) / "cache")
        revision, folder = fetched(local, WEIGHTS)
        shared = replace(local, is_offline=is_offline)
        with without_rights(local.cache):
            found, again = fetched(shared, WEIGHTS)
        assert (found.commit, again) == (revision.commit, folder)
        (folder / WEIGHTS).unlink()
        hub.requested.clear()
        advice = "is not in the cache" if is_offline else "Permission denied; make it writable, or"
        with without_rights(local.cache), pytest.raises(CheckpointError, match=advice) as caught:
            fetched(shared, WEIGHTS)
        assert "\n" not in str(caught.value)
        assert hub.gets_of(WEIGHTS) == []


def test_damaged_file_is_removed_and_downloaded_again(hub: SmallHub, settings: HubSettings) -> None:
    hub.faults.append(Fault(WEIGHTS, flips_byte=True))
    with pytest.raises(CheckpointError, match=r"org/tiny: model.safetensors was damaged during"):
        fetched(settings, WEIGHTS)
    _, folder = fetched(settings, WEIGHTS)
    assert (folder / WEIGHTS).read_bytes() == (TINY_LLAMA / WEIGHTS).read_bytes()


def test_file_that_is_too_short_is_downloaded_again(settings: HubSettings) -> None:
    _, folder = fetched(settings, WEIGHTS)
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate(1000)
    _, folder = fetched(settings, WEIGHTS)
    assert (folder / WEIGHTS).read_bytes() == (TINY_LLAMA / WEIGHTS).read_bytes()


def test_file_of_a_killed_download_is_verified(settings: HubSettings) -> None:
    revision, folder = fetched(settings, WEIGHTS)
    snapshot = Snapshot(settings.cache, revision.id, revision.commit)
    files = [file for file in revision.files if file.name == WEIGHTS]
    with pytest.raises(KeyboardInterrupt), snapshot.receiving(files):
        raise KeyboardInterrupt
    assert snapshot.missing(files) == files
    with (folder / WEIGHTS).open("r+b") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match="was damaged"):
        fetched(settings, WEIGHTS)


@pytest.mark.parametrize("is_offline", [True, False])
@pytest.mark.parametrize("has_listing", [True, False])
def test_cached_model_needs_no_network(
    settings: HubSettings, is_offline: bool, has_listing: bool
) -> None:
    revision, folder = fetched(settings, WEIGHTS)
    if not has_listing:
        shutil.rmtree(settings.cache / "models--org--tiny" / "pagedray")
    cut_off = replace(unreachable(settings), is_offline=is_offline)
    found, again = fetched(cut_off, WEIGHTS)
    assert (found.commit, again) == (revision.commit, folder)


@pytest.mark.parametrize("name", ["tokenizer.json", WEIGHTS])
def test_half_of_a_model_in_the_cache_is_no_model(settings: HubSettings, name: str) -> None:
    _, folder = fetched(settings, WEIGHTS)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name} of org/tiny@\w{{12}} is not in the cache"):
        fetched(replace(settings, is_offline=True), WEIGHTS)


@pytest.mark.slow  # The library tries again for half a minute.
def test_half_of_a_model_is_no_model_without_network(settings: HubSettings) -> None:
    _, folder = fetched(settings)
    assert not (folder / WEIGHTS).exists()
    with pytest.raises(CheckpointError, match=r"127.0.0.1:9: \[Errno 111\] Connection refused"):
        fetched(unreachable(settings), WEIGHTS)


@pytest.mark.parametrize(
    ("model", "fault", "expected"),
    [
        ("org/none", None, "org/none is neither a folder nor a model on"),
        ("org/tiny@v9", None, "org/tiny has no revision v9 on"),
        ("org/tiny", Fault("/api/", status=401), "org/tiny is neither a folder nor a model on"),
        ("org/tiny", Fault("/api/", status=403), "denies access to org/tiny (403); set HF_TOKEN"),
        ("org/tiny", Fault("/api/", 9, status=403, headers=GATED), "is gated (403): accept its"),
        ("org/tiny", Fault("/config.json", 9, "HEAD", 401, GATED), "is gated (401): accept its"),
        (
            "org/tiny",
            Fault("/api/", 9, status=429),
            "is limiting the rate of requests (429); try again",
        ),
        ("org/tiny", Fault("/api/", 9, status=500), "returned status 500; try again later"),
    ],
)
def test_fault_is_one_line_that_says_what_to_do(
    hub: SmallHub, settings: HubSettings, model: str, fault: Fault | None, expected: str
) -> None:
    hub.faults += [] if fault is None else [fault]
    assert expected in error_of(settings, model)


def test_error_of_one_moment_is_tried_again(hub: SmallHub, settings: HubSettings) -> None:
    hub.faults += [Fault("/api/", status=503), Fault("/config.json", 1, "HEAD", 500)]
    fetched(settings)


def test_rejected_token_is_named(
    hub: SmallHub, settings: HubSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    hub.faults.append(Fault("/api/", status=401))
    assert "denies access to org/tiny with this token (401)" in error_of(settings)


@pytest.mark.parametrize(
    ("path", "answer_timeout_s", "expected"),
    [
        ("/api/", 0.5, r": timed out; check the network"),
        ("/config.json", 60.0, "nothing was"),
    ],
)
def test_silent_hub_is_given_up(
    hub: SmallHub, settings: HubSettings, path: str, answer_timeout_s: float, expected: str
) -> None:
    is_over = threading.Event()
    hub.faults.append(Fault(path, stalls=is_over))
    limited = replace(settings, answer_timeout_s=answer_timeout_s, silence_s=0.5)
    error = error_of(limited)
    is_over.set()
    assert re.search(expected, error)


def test_model_that_exceeds_the_disk_is_rejected(settings: HubSettings) -> None:
    revision, _ = fetched(settings)
    files = tuple(replace(file, size=10**18) for file in revision.files if file.name == WEIGHTS)
    with pytest.raises(CheckpointError, match=r"org/tiny needs 1000000000.00 GB more in"):
        fetch_files(replace(revision, files=files), [WEIGHTS], settings=settings)


def test_model_without_configuration_or_safetensors_is_rejected(
    hub: SmallHub, settings: HubSettings
) -> None:
    hub.push("org/tiny", {"model.onnx": b"x"})
    assert error_of(settings) == (
        "org/tiny has no config.json; a model must be a checkpoint in the format of transformers."
    )
    hub.push("org/tiny", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    revision, folder = fetched(settings)
    with pytest.raises(CheckpointError, match=r"pickled ones \(\*\.bin\) are never loaded"):
        check_weights_listed(revision, folder)


def test_another_node_downloads_the_weights_by_the_index(
    hub: SmallHub, settings: HubSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = folder_files(TINY_LLAMA)
    content = files.pop(WEIGHTS)
    index = {"weight_map": {"x": "a-1.safetensors", "y": "a-2.safetensors"}}
    files |= {f"{WEIGHTS}.index.json": json.dumps(index).encode(), "b.safetensors": b"x"}
    hub.push("org/tiny", files | {"a-1.safetensors": content, "a-2.safetensors": b"y"})
    revision, folder = fetched(settings)
    config = EngineConfig(model=replace(read_model_config(folder), hub=revision))
    elsewhere = replace(settings, cache=settings.cache.with_name("elsewhere"))
    monkeypatch.setattr(HubSettings, "from_environment", lambda _=None: elsewhere)
    local = with_local_weights(config, lambda done, total: None).model.folder
    assert local.is_relative_to(elsewhere.cache)
    assert {path.name for path in local.glob("*.safetensors")} == set(index["weight_map"].values())
    assert find_revision(NAME, settings) == revision
