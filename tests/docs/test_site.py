"""The documentation builds as a site without dead links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cluster.engine.engine_options import EngineOptions, engine_config
from cluster.serving.intake import IntakeLimits, request_size
from cluster.serving.rpc.requests import max_received_bytes
from pagedray.errors import PagedRayError
from pagedray.v1 import pagedray_pb2 as pb
from scripts.site_pages import site_pages
from tests.system.server_process import ROOT, TINY_LLAMA


def test_site_builds_without_warnings(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "--quiet", "build", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
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


def test_grpc_page_has_every_status_and_the_limit_of_messages() -> None:
    text = " ".join(site_pages()["reference/grpc.md"].partition("## GenerationService")[0].split())
    assert PagedRayError.grpc_status in text
    for error in _subclasses(PagedRayError):
        assert error.grpc_status in text, error
    config = engine_config(str(TINY_LLAMA), EngineOptions(device="cpu", max_model_len=512))
    assert request_size(config, IntakeLimits()).num_bytes == 2**20 + 512 * 2**10
    assert "1 MiB and 1 KiB for each token of the context" in text
    assert max_received_bytes(1000) == 1500
    assert "1.5 times the limit" in text


def _subclasses(kind: type[PagedRayError]) -> Iterator[type[PagedRayError]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def test_command_page_has_every_command() -> None:
    page = site_pages()["reference/command-line.md"]
    for command, flag in (
        ("serve", "--http-port"),
        ("bench serve", "--request-rate"),
        ("bench throughput", "--num-prompts"),
        ("keys new", "--tenant"),
        ("deploy check", "--chart"),
    ):
        section = re.split(r"^#+ ", page.partition(f"# pagedray {command}\n")[2], flags=re.M)[0]
        assert flag in section, command
