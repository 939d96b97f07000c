"""Facts of the documents are true of the code: layers, limits, versions, figures and help."""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import fields
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from cluster.serving.listener import MAX_TOTAL
from cluster.serving.ray_serve.options import ServeOptions
from cluster.serving.rpc.server import MIN_STREAMS
from cluster.structured.grammar.grammar_text import grammar_text
from pagedray import Structure
from pagedray.errors import InvalidRequestError
from pagedray.version import __version__
from scripts.release import check_contents, notes_of
from tests.system.server_process import ROOT

_ROW = re.compile(
    r"^\| (.+?) \| ([0-9][0-9 ]*(?:; [0-9][0-9 ]*)*)(?: characters)? \|$", re.MULTILINE
)
_HEADER = "| a client cannot |"
_ROWS = re.findall(
    r"^\| (`\w.*?) \| .* \| (.*) \|$", (ROOT / "docs" / "ray-serve.md").read_text(), re.MULTILINE
)
_DEFAULTS = {
    name: written
    for names, defaults in _ROWS
    for name, written in zip(re.findall(r"`(\w+)`", names), defaults.split(", "), strict=False)
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSIONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
_SPEED_ROW = re.compile(
    r"\| (?P<model>[^|]+) \| (?P<num_gpus>\d) (?P<gpu>\w+), (?P<date>[\d-]+) \|"
    r" (?P<latency>[\d.]*) \| (?P<throughput>[\d ]*?) ?\| `(?P<command>[^`]+)` \|"
)
_SPEED_ROWS = [row.groupdict() for row in _SPEED_ROW.finditer((ROOT / "README.md").read_text())]
_OUTPUT = re.compile(r" --output \S+")
RUN_BY_PROGRAMS = (
    "bench/cpu_int4/llama_cpp_server.py",
    "tests/clients/programs/",
    "tests/deploy/logging_replica.py",
    "tests/hostile/fuzz/fuzz_target.py",
    "tests/shared_ray.py",
    "tests/structured/fake_masks.py",
    "tests/system/faults/other_node.py",
    "tests/workers/parallel/",
)
"""Their arguments come from other programs and tests."""


def test_the_layers_of_the_document_are_those_of_the_checks() -> None:
    enforced = {
        (contract.get("containers") or ["the root packages"])[0]: [
            set(re.split(r" [|:] ", layer)) for layer in contract["layers"]
        ]
        for contract in _contracts("layers")
    }
    first, *others = _found(r"```text\n(cluster > .*?)```").split("\n\n")
    shown = {"the root packages": _layers(first)}
    for package, layers in re.findall(r"^(\S+) +(.*\n(?: +.*\n)*)", "".join(others), re.MULTILINE):
        shown[package] = _layers(layers)
    assert shown == enforced


def test_the_document_names_every_module_that_may_import_a_large_library() -> None:
    importers = {
        line.split(" -> ")[0].removesuffix(".**").removesuffix(".*").replace(".", "/")
        for contract in _contracts("forbidden")
        for line in contract.get("ignore_imports", ())
        if not line.startswith("pagedray.v1.")
    }
    paragraph = _found(r"(Only a few modules import a large library\..*?)\n\n")
    named = {name.removesuffix(".py").rstrip("/") for name in re.findall(r"`([^`]+)`", paragraph)}
    missing = [
        importer
        for importer in importers
        if named.isdisjoint((importer, Path(importer).name, str(Path(importer).parent)))
    ]
    assert not missing


def _contracts(kind: str) -> list[dict[str, Any]]:  # Any: values of TOML
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    return [contract for contract in contracts if contract["type"] == kind]


def _found(pattern: str) -> str:
    """Return what the group of a pattern matches in the document."""
    found = re.search(pattern, (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def _layers(text: str) -> list[set[str]]:
    return [set(re.split(r", ", " ".join(layer.split()))) for layer in text.split(">")]


def _regex(text: str) -> Structure:
    return Structure(kind="regex", text=text)


def _choices(number: int) -> Structure:
    return Structure(kind="choice", text=json.dumps([f"a{index}" for index in range(number)]))


def _schema(**fields: object) -> Structure:
    return Structure(kind="json_schema", text=json.dumps(fields))


def _object(number: int, *, is_required: bool) -> Structure:
    names = [f"a{index}" for index in range(number)]
    return _schema(
        type="object",
        properties={name: {"type": "null"} for name in names},
        required=names if is_required else [],
    )


_MADE: Mapping[str, Callable[[int], Structure]] = {
    "characters of a regular expression": lambda number: _regex(number * "a"),
    "with repetitions expanded": lambda number: _regex(f"(?:{number // 1000 * 'a'}){{1000}}"),
    "nested groups of a regular expression": lambda number: _regex(
        number * "(" + "a" + number * ")"
    ),
    "repeat count": lambda number: _regex(f"a{{{number}}}"),
    "choices": _choices,
    "schemas of a `oneOf`": lambda number: _schema(
        oneOf=[{"const": f"a{one}"} for one in range(number)]
    ),
    "properties of an object": lambda number: _object(number, is_required=True),
    "properties that are not required": lambda number: _object(number, is_required=False),
}
"""Structures of a size, by the limit in the table."""


def _documented() -> dict[str, int]:
    text = (ROOT / "docs" / "structured-output.md").read_text()
    return {
        name: int(limit.replace(" ", ""))
        for names, limits in _ROW.findall(text)
        for name, limit in zip(names.split("; "), limits.split("; "), strict=True)
        if name in _MADE
    }


def test_the_table_has_the_limits() -> None:
    assert _documented().keys() == _MADE.keys()


@pytest.mark.parametrize("name", _MADE)
def test_the_limit_is_the_documented_one(name: str) -> None:
    limit = _documented()[name]
    # A repeated group has a multiple of 1000 characters.
    step = 1000 if "expanded" in name else 1
    assert grammar_text(_MADE[name](limit))
    with pytest.raises(InvalidRequestError):
        grammar_text(_MADE[name](limit + step))


@pytest.mark.parametrize(
    ("document", "text", "limit"),
    [
        (
            "docs/limits.md",
            r"A gRPC connection carries ([\d ]+) calls at once, or twice",
            MIN_STREAMS,
        ),
        (
            "docs/security.md",
            r"\| ([\d ]+) concurrent calls on one gRPC connection, or twice",
            MIN_STREAMS,
        ),
        ("docs/security.md", r"half of the others, but at most ([\d ]+)\.", MAX_TOTAL),
    ],
)
def test_documents_have_the_limits_of_connections(document: str, text: str, limit: int) -> None:
    found = re.search(text, (ROOT / document).read_text())
    assert found is not None
    assert int(found[1].replace(" ", "")) == limit


def _limit_rows(document: str) -> list[str]:
    """Return the first cells of the table of limits in a document."""
    _, _, table = (ROOT / "docs" / document).read_text().partition(_HEADER)
    lines = table.partition("\n\n")[0].splitlines()[2:]
    return [line.removeprefix("| ").partition(" | ")[0] for line in lines]


def test_the_code_of_each_limit_is_documented() -> None:
    assert _limit_rows("security.md") == _limit_rows("design/serving.md") != []


@pytest.mark.parametrize("name", [field.name for field in fields(ServeOptions)])
def test_the_document_has_the_default_of_an_argument(name: str) -> None:
    default, written = getattr(ServeOptions(), name), _DEFAULTS[name].strip("`")
    if default is None:
        # What happens without it is said in words.
        assert not re.fullmatch(r"[\d.]+|true|false", written)
    elif isinstance(default, str):
        assert written == default
    else:
        assert json.loads(written) == default


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "Makefile", "README.md", "docs/quickstart.md"])
def test_the_oldest_version_is_named(name: str) -> None:
    assert PROJECT["requires-python"] == f">={VERSIONS[0]}"
    assert f"Python {VERSIONS[0]} or later" in (ROOT / name).read_text()


def test_the_tested_versions_are_named() -> None:
    text = " ".join((ROOT / "docs/quickstart.md").read_text().split())
    assert f"tested on {VERSIONS[0]} to {VERSIONS[-1]};" in text


def _results_of(command: str, *, gpu: str, date: str) -> dict[str, Any]:  # Any: JSON
    """Return the results that a command wrote on that day, on such a GPU."""
    results = [json.loads(path.read_text()) for path in ROOT.glob("bench/results/engine*.json")]
    [found] = [
        one
        for one in results
        if _OUTPUT.sub("", one["command"]) == command
        and one["date"] == date
        and gpu in one["device"]
    ]
    assert isinstance(found, dict)
    return found


def _rounded(figure: float, like: str) -> str:
    """Return a figure with as many decimals as another one, and spaces between thousands."""
    decimals = -int(Decimal(like).as_tuple().exponent)
    return f"{figure:,.{decimals}f}".replace(",", " ")


def test_all_rows_are_read() -> None:
    table = (ROOT / "README.md").read_text().split("## Speed")[1].split("\n## ")[0]
    assert len(_SPEED_ROWS) == sum(line.startswith("| ") for line in table.splitlines()) - 2 > 4


@pytest.mark.parametrize("row", _SPEED_ROWS, ids=lambda row: f"{row['model']}, {row['num_gpus']}")
def test_figures_are_those_of_the_results(row: dict[str, str]) -> None:
    results = _results_of(row["command"], gpu=row["gpu"], date=row["date"])
    figures = {
        (one["workload"]["name"], one["workload"]["num_requests"]): one["figure"]
        for one in results["rows"]
    }
    assert _rounded(figures["latency", 1], row["latency"]) == row["latency"]
    if row["throughput"]:
        assert _rounded(figures["throughput", 256], "1") == row["throughput"]


def test_changelog_has_the_version() -> None:
    notes = notes_of((ROOT / "CHANGELOG.md").read_text(), __version__)
    assert notes.startswith("The first release.")


def test_notes_are_one_section() -> None:
    changelog = "# C\n\n## 2.0\n\nB\n\n### Added\n\n- c\n\n## 1.0\n\nA\n"
    assert notes_of(changelog, "2.0") == "B\n\n### Added\n\n- c\n"
    assert notes_of(changelog, "1.0") == "A\n"
    with pytest.raises(SystemExit, match=r"no section 3\.0"):
        notes_of(changelog, "3.0")


def test_a_wheel_without_protos_is_rejected(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pagedray/py.typed", "")
    with pytest.raises(SystemExit, match=r"pagedray/v1/pagedray\.proto"):
        check_contents(wheel)


def programs() -> list[str]:
    """Return the module names of all programs that people run."""
    paths = {
        path.relative_to(ROOT).as_posix(): path
        for folder in ("bench", "deploy", "scripts", "tests")
        for path in (ROOT / folder).rglob("*.py")
    }
    return sorted(
        name.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
        for name, path in paths.items()
        if 'if __name__ == "__main__":\n' in path.read_text()
        and not name.startswith(RUN_BY_PROGRAMS)
    )


@pytest.mark.slow
@pytest.mark.parametrize("program", programs())
def test_a_program_describes_itself(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", program, "--help"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")
