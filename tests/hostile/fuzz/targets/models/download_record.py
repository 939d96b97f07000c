"""The record of a model that was downloaded from S3, and the names of such models."""

from __future__ import annotations

from pathlib import Path

from pagedray.errors import CheckpointError
from tests.hostile.fuzz.scratch import scratch_folder
from tests.hostile.fuzz.target import Target, check_message
from workers.hub.mirror import Mirror, parse_location

_FOLDER = scratch_folder()
_NOTES = Path(_FOLDER, ".pagedray")
_NOTES.mkdir()
Path(_FOLDER, "config.json").write_bytes(b"{}")


def run(data: bytes) -> None:
    """Say what is wrong with a folder, or nothing; a name is a bucket and a prefix, or an error."""
    (_NOTES / "files.json").write_bytes(data)
    mirror = Mirror(_FOLDER)
    problem = mirror.problem()
    assert problem is None or "\n" not in problem
    mirror.mirrors(())
    try:
        location = parse_location(data.decode("utf-8", "replace"))
    except CheckpointError as error:
        check_message(error)
        return
    assert ".." not in location.prefix
    assert parse_location(str(location)) == location


_RECORD = b'{"files":[{"name":"config.json","size":2,"etag":"x"}],"is_complete":true}'

TARGET = Target(
    run=run,
    seeds=(_RECORD, b'{"files":[],"is_complete":false}', b"s3://models/a/b-1.0=x/"),
    words=(
        b'"name"',
        b'"size"',
        b'"etag"',
        b"null",
        b"\\u0000",
        b"\\ud800",
        b"1e999",
        b"s3://a.b/",
    ),
    max_bytes=512,
)
