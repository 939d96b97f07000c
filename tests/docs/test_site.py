"""The documentation builds as a site without dead links, and its quick start works as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pagedray.v1 import pagedray_pb2 as pb
from scripts.site_pages import site_pages
from tests.system.server_process import ROOT, ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
QUICK_START = _BLOCK.findall((ROOT / "docs" / "quickstart.md").read_text())


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
    assert "Return the likeliest continuations of each prompt" in reference
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


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """The server of the quick start, on free ports."""
    (command,) = (text for _, text in QUICK_START if text.startswith("pagedray serve"))
    assert command.split() == ["pagedray", "serve", "examples/tiny-llama"]
    with ServerProcess(("--executor=local",)) as server:
        yield server


@pytest.mark.parametrize(
    ("language", "text"),
    [block for block in QUICK_START if not block[1].startswith("pagedray serve")],
    ids=lambda text: text.partition("\n")[0][:32],
)
def test_quick_start_works(server: ServerProcess, language: str, text: str) -> None:
    text = text.replace("127.0.0.1:8000", f"127.0.0.1:{server.http_port}")
    text = text.replace("127.0.0.1:9000", f"127.0.0.1:{server.grpc_port}")
    command = ["bash", "-ec"] if language == "sh" else [sys.executable, "-c"]
    # The environment of the tests is active in its text.
    path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [*command, text],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 20
    assert '"error"' not in done.stdout
