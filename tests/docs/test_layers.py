"""The layers that docs/architecture.md shows are those that import-linter enforces."""

import re
import tomllib
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def test_the_layers_of_the_document_are_those_of_the_checks() -> None:
    settings = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    enforced = {
        (contract.get("containers") or ["the root packages"])[0]: [
            set(re.split(r" [|:] ", layer)) for layer in contract["layers"]
        ]
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    }
    document = (_ROOT / "docs" / "architecture.md").read_text()
    block = re.findall(r"```text\n(cluster > .*?)```", document, re.DOTALL)[0]
    first, *others = block.split("\n\n")
    shown = {"the root packages": _layers(first)}
    for package, layers in re.findall(r"^(\S+) +(.*\n(?: +.*\n)*)", "".join(others), re.MULTILINE):
        shown[package] = _layers(layers)
    assert shown == enforced


def _layers(text: str) -> list[set[str]]:
    return [set(re.split(r", ", " ".join(layer.split()))) for layer in text.split(">")]
