"""A model is downloaded from S3 once and whole, whatever the server does."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from pagedray.errors import CheckpointError
from tests.downloads.faulty_server import Fault
from tests.downloads.small_hub import folder_files
from tests.downloads.small_s3 import SmallS3
from tests.system.server_process import TINY_LLAMA
from workers.hub.bucket import Bucket, fetch_folder
from workers.hub.locate import DownloadLine
from workers.hub.mirror import Mirror, S3Location, parse_location
from workers.hub.model_name import HubName, parse_model

_WEIGHTS = "model.safetensors"
_WHERE = S3Location("models", "team/tiny")
_CHUNK = 2**16
# Of eight chunks.
FILES = folder_files(TINY_LLAMA) | {_WEIGHTS: save({"weight": torch.rand(2**17)})}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def s3(small_s3: SmallS3) -> SmallS3:
    small_s3.push("team/tiny", FILES)
    # A folder beside it, whose name begins the same.
    small_s3.push("team/tiny-2", {"config.json": b"{}"})
    return small_s3


def fetch(folder: Path, report_progress: Callable[[int, int], None] | None = None) -> Path:
    bucket = Bucket(_WHERE, retry_s=0.001)
    return fetch_folder(_WHERE, folder, bucket, chunk_bytes=_CHUNK, report_progress=report_progress)


def test_the_folder_is_that_of_the_bucket(s3: SmallS3, tmp_path: Path) -> None:
    folder = fetch(tmp_path / "tiny")
    for name in ("config.json", "tokenizer.json", _WEIGHTS):
        assert (folder / name).read_bytes() == FILES[name]
    assert Mirror(folder).problem() is None
    assert not list(folder.rglob("*.part"))
    assert all(each.token is not None for each in s3.requested)


def test_a_job_that_runs_again_downloads_nothing(s3: SmallS3, tmp_path: Path) -> None:
    folder = fetch(tmp_path / "tiny")
    s3.requested.clear()
    assert fetch(folder) == folder
    assert [each.path for each in s3.requested] == ["/models"]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(_WEIGHTS, times=3, cut_after=100),
        Fault(_WEIGHTS, times=3, status=500),
        Fault(_WEIGHTS, times=3, status=503),
        Fault(_WEIGHTS, times=3, status=429),
        Fault("/models", times=3, status=429),
    ],
    ids=["cut", "500", "503", "429", "429-of-the-list"],
)
def test_a_fault_that_passes_is_survived(s3: SmallS3, tmp_path: Path, fault: Fault) -> None:
    s3.faults.append(fault)
    folder = fetch(tmp_path / "tiny")
    assert fault.times == 0
    assert (folder / _WEIGHTS).read_bytes() == FILES[_WEIGHTS]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(_WEIGHTS, times=99, cut_after=100), "cannot be downloaded: "),
        (Fault(_WEIGHTS, times=99, status=500), "S3 answers with status 500"),
        (Fault(_WEIGHTS, times=99, status=429), "S3 limits requests"),
        (Fault(_WEIGHTS, status=403), "S3 denies access to s3://models/team/tiny (403); use"),
        (Fault("/models", times=99, status=403), "S3 denies access"),
        (Fault("/models", times=99, status=404), "does not exist; check the bucket"),
    ],
    ids=["cut", "500", "429", "403", "403-of-the-list", "no-bucket"],
)
def test_a_fault_that_stays_ends_in_one_line(
    s3: SmallS3, tmp_path: Path, fault: Fault, error: str
) -> None:
    s3.faults.append(fault)
    with pytest.raises(CheckpointError) as caught:
        fetch(tmp_path / "tiny")
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)
    assert Mirror(tmp_path / "tiny").problem() is not None


def test_an_invalid_name_in_the_list_ends_in_one_line(s3: SmallS3, tmp_path: Path) -> None:
    s3.objects["team/tiny/a\x01b"] = b"x"
    with pytest.raises(CheckpointError, match="invalid path") as caught:
        fetch(tmp_path / "tiny")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("etag", ["a\x01b", "\u00e9"])
def test_an_etag_that_is_no_header_ends_in_one_line(s3: SmallS3, tmp_path: Path, etag: str) -> None:
    s3.listed_etags["team/tiny/config.json"] = etag
    with pytest.raises(CheckpointError, match=r"a file 'config.json' with an invalid ETag"):
        fetch(tmp_path / "tiny")


def test_a_short_file_is_never_served(s3: SmallS3, tmp_path: Path) -> None:
    size = len(FILES[_WEIGHTS])
    s3.listed_sizes[f"team/tiny/{_WEIGHTS}"] = size + 1000
    with pytest.raises(CheckpointError, match="is shorter than the size"):
        fetch(tmp_path / "tiny")
    assert not (tmp_path / "tiny" / _WEIGHTS).exists()
    assert Mirror(tmp_path / "tiny").problem() is not None


def test_the_next_run_continues_where_a_killed_one_stopped(s3: SmallS3, tmp_path: Path) -> None:
    kill_after_two_chunks(s3, tmp_path / "tiny")
    assert Mirror(tmp_path / "tiny").problem() is not None
    s3.requested.clear()
    fetch(tmp_path / "tiny")
    assert s3.ranges_of(_WEIGHTS)[0].startswith(f"bytes={2 * _CHUNK}-")
    # What was complete is not read again.
    assert s3.ranges_of("config.json") == []


def test_a_part_of_another_version_is_not_continued(s3: SmallS3, tmp_path: Path) -> None:
    kill_after_two_chunks(s3, tmp_path / "tiny")
    changed = bytes(len(s3.objects[f"team/tiny/{_WEIGHTS}"]))
    s3.push("team/tiny", {_WEIGHTS: changed})
    folder = fetch(tmp_path / "tiny")
    assert (folder / _WEIGHTS).read_bytes() == changed
    assert not list(folder.rglob("*.part"))


def test_a_file_that_changes_during_its_download_is_rejected(s3: SmallS3, tmp_path: Path) -> None:
    weights = s3.objects[f"team/tiny/{_WEIGHTS}"]

    def change_after_one_chunk(done: int, total: int) -> None:
        if total > len(weights) and done - (total - len(weights)) == _CHUNK:
            s3.push("team/tiny", {_WEIGHTS: bytes(len(weights))})

    with pytest.raises(CheckpointError, match="was changed during its download; start again"):
        fetch(tmp_path / "tiny", change_after_one_chunk)
    assert Mirror(tmp_path / "tiny").problem() is not None


def test_a_model_whose_update_fails_is_not_served(s3: SmallS3, tmp_path: Path) -> None:
    folder = fetch(tmp_path / "tiny")
    s3.push("team/tiny", {_WEIGHTS: b"other"})
    s3.faults.append(Fault(_WEIGHTS, status=403))
    with pytest.raises(CheckpointError):
        fetch(folder)
    assert Mirror(folder).problem() is not None


def test_a_file_that_was_shortened_later_is_noticed_and_mended(s3: SmallS3, tmp_path: Path) -> None:
    folder = fetch(tmp_path / "tiny")
    with (folder / _WEIGHTS).open("r+b") as file:
        file.truncate(1000)
    problem = Mirror(folder).problem()
    assert problem is not None
    assert f"does not have {len(s3.objects[f'team/tiny/{_WEIGHTS}'])} bytes" in problem
    fetch(folder)
    assert Mirror(folder).problem() is None


def test_a_file_that_was_added_later_is_downloaded(s3: SmallS3, tmp_path: Path) -> None:
    tokenizer = s3.objects.pop("team/tiny/tokenizer.json")
    folder = fetch(tmp_path / "tiny")
    assert not (folder / "tokenizer.json").exists()
    s3.push("team/tiny", {"tokenizer.json": tokenizer})
    fetch(folder)
    assert (folder / "tokenizer.json").read_bytes() == tokenizer


def test_a_file_that_another_version_lacks_is_removed(s3: SmallS3, tmp_path: Path) -> None:
    s3.push("team/tiny", {"chat_template.jinja": b"{{ messages }}"})
    folder = fetch(tmp_path / "tiny")
    (folder / "notes.txt").write_text("Of the user.")
    del s3.objects["team/tiny/chat_template.jinja"]
    fetch(folder)
    assert not (folder / "chat_template.jinja").exists()
    assert Mirror(folder).problem() is None
    assert (folder / "notes.txt").exists()


def test_a_record_of_a_file_elsewhere_removes_nothing(s3: SmallS3, tmp_path: Path) -> None:
    folder = fetch(tmp_path / "tiny")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch()
    record = folder / ".pagedray" / "files.json"
    parsed = json.loads(record.read_bytes())
    for name in ("../elsewhere", str(elsewhere)):
        parsed["files"].append({"name": name, "size": 0, "etag": "a"})
    record.write_text(json.dumps(parsed))
    fetch(folder)
    assert elsewhere.exists()


def kill_after_two_chunks(s3: SmallS3, folder: Path) -> None:
    """Begin a download, and end it after two chunks of the weights."""
    weights = len(s3.objects[f"team/tiny/{_WEIGHTS}"])

    def die(done: int, total: int) -> None:
        if total > weights and done - (total - weights) == 2 * _CHUNK:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(folder, die)


def test_another_version_is_downloaded_from_its_beginning(s3: SmallS3, tmp_path: Path) -> None:
    folder = fetch(tmp_path / "tiny")
    changed = bytes(len(s3.objects[f"team/tiny/{_WEIGHTS}"]))
    s3.push("team/tiny", {_WEIGHTS: changed})
    s3.requested.clear()
    fetch(folder)
    assert (folder / _WEIGHTS).read_bytes() == changed
    assert s3.ranges_of("config.json") == []


def test_an_index_may_list_files_of_the_folder_only(s3: SmallS3, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "../../secret"}}
    s3.objects.pop(f"team/tiny/{_WEIGHTS}")
    s3.push("team/tiny", {"model.safetensors.index.json": json.dumps(index).encode()})
    with pytest.raises(CheckpointError, match="secret"):
        fetch(tmp_path / "tiny")


def test_without_credentials_requests_are_not_signed(
    s3: SmallS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    fetch(tmp_path / "tiny")
    assert all(each.token is None for each in s3.requested)


@pytest.mark.parametrize(
    "text", ["s3://", "s3://b", "s3://models/", "s3://models/a/../b", "s3://models/a b", "models/a"]
)
def test_other_names_are_rejected(text: str) -> None:
    with pytest.raises(CheckpointError, match="is not a folder in S3"):
        parse_location(text)


def test_a_name_is_a_bucket_and_a_prefix() -> None:
    assert parse_location("s3://models/team/tiny/") == _WHERE
    assert str(_WHERE) == "s3://models/team/tiny"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B", "main")),
        ("a/b_c.d@v1.0", HubName("a/b_c.d", "v1.0")),
        ("a/b@refs/pr/1", HubName("a/b", "refs/pr/1")),
        (f"a/b@{COMMIT}", HubName("a/b", COMMIT)),
        ("a/b-GGUF:Q4_K_M", HubName("a/b-GGUF", "main", "Q4_K_M")),
        ("a/b-GGUF:Q8_0@v1", HubName("a/b-GGUF", "v1", "Q8_0")),
    ],
)
def test_name_with_one_slash_is_a_hub_id(model: str, expected: HubName) -> None:
    assert parse_model(model) == expected


def test_folder_that_exists_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_model("org/name") == Path("org/name")
    assert parse_model(Path("org/other")) == Path("org/other")


@pytest.mark.parametrize(
    "model", ["/x", "./x", "../x", "~/x", "x", "", "a/b/c", "/a/b", "org/../x", "a/" + "b/" * 5000]
)
def test_name_that_is_no_id_is_not_a_folder(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing beside or below the working folder has such a name.
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(CheckpointError, match="is not a folder; a model is a folder with"):
        parse_model(model)


@pytest.mark.parametrize(
    "model",
    [
        *("a/..", "a/b..c", "a/b--c", "a/b c", 'a/"b"', "a/b'", "a/b\n", "a/\x00", "a/.b", "a/é"),
        "a/" + "b" * 97,
        "a/b;rm",
    ],
)
def test_invalid_id_is_named_in_one_line(model: str) -> None:
    with pytest.raises(CheckpointError, match="is neither a folder nor a valid Hub id") as caught:
        parse_model(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "revision", ["", "..", "a..b", "a b", "-x", "x/", "x.lock", "a//b", "x" * 300]
)
def test_invalid_revision_is_rejected(revision: str) -> None:
    with pytest.raises(CheckpointError, match="names an invalid revision"):
        parse_model(f"a/b@{revision}")


def test_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match=r"model.bin is a file; a model is a folder"):
        parse_model(str(tmp_path / "model.bin"))


def test_speed_is_that_of_the_last_seconds() -> None:
    times = iter([0.0, 0.1, 1.0, 2.0, 20.0, 22.0])
    line = DownloadLine("org/tiny", lambda: next(times))
    assert line.text(0) == "Downloading org/tiny"
    assert line.text(1_000_000) == "Downloading org/tiny"
    assert line.text(5_000_000) == "Downloading org/tiny; 5.0 MB/s"
    assert line.text(20_000_000) == "Downloading org/tiny; 10.0 MB/s"
    assert line.text(30_000_000) == "Downloading org/tiny"
    assert line.text(31_000_000) == "Downloading org/tiny; 0.5 MB/s"
