"""`pagedray keys new`: its output is a valid entry of a key file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from cluster.cli.commands import main
from cluster.serving.auth import Authenticator

if TYPE_CHECKING:
    from pathlib import Path


def test_a_new_key_is_accepted_with_its_printed_entry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "new", "--tenant=research.a-1"]) == 0
    out = capsys.readouterr().out
    (key,) = re.findall(r"^    (\S+)$", out, re.MULTILINE)
    lines = out[out.index("[tenants.") :]
    assert key not in lines
    path = tmp_path / "keys.toml"
    path.touch(0o600)
    path.write_text(lines)
    assert Authenticator(path).authenticate(f"Bearer {key}").name == "research.a-1"


@pytest.mark.parametrize("tenant", ["", 'a"b', "a\nb", "x" * 65])
def test_an_invalid_tenant_name_is_rejected(
    tenant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "new", f"--tenant={tenant}"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert "tenant" in shown.err
