"""The layers and importers that docs/architecture.md names are those that import-linter allows."""

import re
import tomllib
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]


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
    settings = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    return [contract for contract in contracts if contract["type"] == kind]


def _found(pattern: str) -> str:
    """Return what the group of a pattern matches in the document."""
    found = re.search(pattern, (_ROOT / "docs" / "architecture.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def _layers(text: str) -> list[set[str]]:
    return [set(re.split(r", ", " ".join(layer.split()))) for layer in text.split(">")]
