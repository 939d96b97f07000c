"""The documentation builds as a site without dead links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

from pagedray.v1 import pagedray_pb2 as pb
from scripts.site_pages import site_pages
from tests.system.server_process import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def test_site_builds_without_warnings(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "--quiet", "build", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    reference = (tmp_path / "reference" / "python" / "index.html").read_text()
    assert "Return the results of a beam search for each prompt" in reference
    # Pages load nothing from other hosts.
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|link rel=\"stylesheet\")[^>]*?(https?://[^\"]*)",
                            page.read_text())  # fmt: skip
        assert loaded == [], page


def test_grpc_page_has_every_field() -> None:
    page = site_pages()["reference/grpc.md"]
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        section = page.partition(f"### {message.name}\n")[2].partition("\n### ")[0]
        for field in message.fields:
            assert re.search(rf"^\| `{field.name}` \| .* \| {field.number} \| .+ \|$", section,
                             re.MULTILINE), field.full_name  # fmt: skip


def test_command_page_has_every_command() -> None:
    page = site_pages()["reference/command-line.md"]
    for command, flag in (
        ("serve", "--http-port"),
        ("bench serve", "--request-rate"),
        ("bench throughput", "--num-prompts"),
        ("keys new", "--tenant"),
        ("deploy check", "--checkpoint"),
    ):
        section = re.split(r"^#+ ", page.partition(f"# pagedray {command}\n")[2], flags=re.M)[0]
        assert flag in section, command
