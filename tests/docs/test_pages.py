"""Pages of the documentation: paths, links, names, spelling and words, and the site."""

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import pagedray
from cluster.engine.engine_options import EngineOptions, engine_config
from cluster.serving.intake import IntakeLimits, request_size
from cluster.serving.rpc.requests import max_received_bytes
from pagedray import LLM, SamplingParams
from pagedray.errors import PagedRayError
from pagedray.v1 import pagedray_pb2 as pb
from scripts.site_pages import site_pages
from scripts.words import counted_words, prose_of
from tests.system.server_process import ROOT, TINY_LLAMA

_CODE_DOCUMENTS = (
    *("architecture.md", "design/faults.md", "design/ranks.md", "design/scheduling.md"),
    *("design/serving.md", "where-to-make-a-change.md"),
)
_PATH = re.compile(r"`(\w[\w./-]*(?:/|\w\.(?:c|h|js|md|proto|py|svg|toml|tpl|yaml)))`")
_CLASS = re.compile(r"`([A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*)(?:[.(`])")
_PACKAGES = ("attention", "bench", "cluster", "pagedray", "workers")
_NOT_OURS = {"Host", "Origin"}
"""Headers of HTTP."""
MAX_PATHS = 110
_DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/*/*.md")
    for path in ROOT.glob(pattern)
)  # fmt: skip
_LINK_IN_HEADING = re.compile(r"\[([^]]*)\]\([^)]*\)")
_NOT_IN_SLUG = re.compile(r"[^\w\- ]")
_BRITISH = re.compile(
    "(?:behavio|colo|favo|flavo|hono|labo|neighbo)ur"
    "|(?:cent|fib|met)re(?:s|d)?\\b"
    "|(?:initial|normal|optim|organ|parallel|recogn|serial|synchron|token)is(?:e|ing|ation)"
    "|(?:label|model|signal|travel)l(?:ed|ing)|catalogue|artefact|licence|towards|for ever\\b"
)
_SUFFIXES = (".c", ".css", ".h", ".html", ".js", ".md", ".proto", ".py", ".toml", ".yaml")
_FOLDERS = (
    "attention",
    "bench",
    "cluster",
    "deploy",
    "docs",
    "examples",
    "pagedray",
    "protos",
    "scripts",
    "tests",
    "workers",
)
_OTHERS = ("aria-labelledby",)
_HEADING = "| in vLLM | in PagedRay |\n"
_TABLE = (ROOT / "docs" / "compatibility.md").read_text().partition(_HEADING)[2]
_ROWS = re.findall(r"^\| (.+?) \| (.+?) \|$", _TABLE.partition("\n\n")[0], re.MULTILINE)[1:]
_NAME = re.compile(r"`(?:LLM\.)?(\w+)`")
_SOURCE = '''
"""Return those blocks."""

what = "what those are"  # Whose blocks.


def first(block: int) -> int:
    """Return the first
    block."""
    # type: ignore[those]
    # Adjacent lines
    # are one text.
    return block
'''


def _text(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def _defined_names() -> set[str]:
    sources = (path.read_text() for package in _PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {
        name
        for source in sources
        for names in re.findall(r"^\s*(?:class (\w+)|([A-Z]\w+)(?::| =))", source, re.MULTILINE)
        for name in names
    }


@pytest.mark.parametrize("document", _CODE_DOCUMENTS)
def test_paths_lead_to_files_and_folders(document: str) -> None:
    missing = [path for path in _PATH.findall(_text(document)) if not (ROOT / path).exists()]
    assert not missing


def test_named_classes_exist() -> None:
    named = {name for document in _CODE_DOCUMENTS for name in _CLASS.findall(_text(document))}
    assert named - _defined_names() - _NOT_OURS == set()


def test_documents_name_few_paths() -> None:
    assert sum(len(_PATH.findall(_text(document))) for document in _CODE_DOCUMENTS) <= MAX_PATHS


def _links(path: Path) -> Iterator[str]:
    """Yield the links and images of a document that lead to files of this repository."""
    for block in MarkdownIt().enable("table").parse(path.read_text()):
        for token in block.children or ():
            address = token.attrs.get("href", token.attrs.get("src"))
            if address is not None and "://" not in str(address):
                yield str(address)


@cache
def _anchors(path: Path) -> set[str]:
    tokens = MarkdownIt().parse(path.read_text())
    headings = [text.content for first, text in pairwise(tokens) if first.type == "heading_open"]
    titles = [_LINK_IN_HEADING.sub(r"\1", heading).lower() for heading in headings]
    return {_NOT_IN_SLUG.sub("", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for link in _links(document):
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.suffix in _SUFFIXES and path.name != "test_pages.py":
            yield path


@pytest.mark.parametrize("folder", _FOLDERS)
def test_spelling_is_american(folder: str) -> None:
    found = set()
    for path in _files(ROOT / folder):
        text = path.read_text(encoding="utf-8").lower()
        for word in _OTHERS:
            text = text.replace(word, "")
        found |= {(path.relative_to(ROOT).as_posix(), word) for word in _BRITISH.findall(text)}
    assert not found


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_rows_belong_to_a_table(document: Path) -> None:
    blocks = MarkdownIt("commonmark").enable("table").parse(document.read_text())
    # Rows without a header are drawn as text.
    assert not [one.content for one in blocks if one.content.startswith("|")]


def _exists(name: str, cell: str) -> bool:
    if f"`LLM.{name}`" in cell:
        return hasattr(LLM, name)
    if cell.endswith("of `SamplingParams`"):
        return name in SamplingParams.__struct_fields__
    if cell.endswith("of `LLM.generate`"):
        return name in inspect.signature(LLM.generate).parameters
    return name in pagedray.__all__


@pytest.mark.parametrize(("theirs", "ours"), _ROWS)
def test_names_are_missing_or_exist(theirs: str, ours: str) -> None:
    for name in _NAME.findall(theirs.rpartition(" of ")[0] or theirs):
        assert not _exists(name, theirs), name
    for name in re.findall(r"`LLM\.(\w+)`", ours):
        assert hasattr(LLM, name), name
    for name in re.findall(r"`([A-Z][a-z]\w+)`", ours):
        assert name in pagedray.__all__, name
    if "`structure`" in ours:
        assert "structure" in SamplingParams.__struct_fields__


def test_the_table_is_read() -> None:
    assert len(_ROWS) == 8


def test_prose_is_docstrings_and_comments() -> None:
    assert sorted(prose_of(_SOURCE)) == [
        (2, "Return those blocks."),
        (4, "Whose blocks."),
        (8, "Return the first block."),
        (11, "Adjacent lines are one text."),
    ]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Those of a block.", "those"),
        ("Return what it needs.", "what-clauses"),
        ("Another one takes it.", "one as a pronoun"),
        ("The last one.", "one as a pronoun"),
        ("Blocks whose content is kept.", "whose"),
    ],
)
def test_each_word_is_counted(text: str, name: str) -> None:
    _, found = counted_words([text])
    assert +found == {name: 1}


@pytest.mark.parametrize(
    "text",
    ["What is a block?", "At least one token.", "One of the ranks.", "Read one by one."],
)
def test_questions_and_numerals_are_not_counted(text: str) -> None:
    _, found = counted_words([text])
    assert not +found


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
