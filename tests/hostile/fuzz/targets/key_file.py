"""The file of API keys."""

from __future__ import annotations

from pathlib import Path

from cluster.serving.auth import KeyFile
from pagedray.errors import StartupError
from tests.hostile.fuzz.scratch import scratch_folder
from tests.hostile.fuzz.target import Target, check_message

_FOLDER = scratch_folder()


def run(data: bytes) -> None:
    """Return tenants or StartupError."""
    path = Path(_FOLDER, "keys.toml")
    path.write_bytes(data)
    path.chmod(0o600)
    try:
        keys = KeyFile.from_file(path)
    except StartupError as error:
        check_message(error)
        return
    assert set(keys.names.values()) <= set(keys.tenants)


_KEY = b"sha256:" + b"0123456789abcdef" * 4

TARGET = Target(
    run=run,
    seeds=(
        b'[tenants.ann]\nkeys = ["' + _KEY + b'"]\nweight = 2.5\nmax_requests = 4\n',
        b'[tenants."b.c"]\nkeys = []\nis_admin = true\n[tenants.d]\nkeys = ["' + _KEY + b'"]\n',
    ),
    words=(b"inf", b"nan", b"1e400", b"'''", b"[[", b"1979-05-27T07:32:00Z", b"a.b.c = 1\n", b"{}"),
    max_bytes=1024,
)
