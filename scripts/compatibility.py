"""Write the tables of docs/compatibility.md, which are made from the code.

python -m scripts.compatibility
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.serving.http.app import ABSENT
from cluster.serving.openai.bodies.chat_body import ChatBody
from cluster.serving.openai.bodies.completion_body import CompletionBody

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cluster.serving.json_body import Body

__all__ = ["document_with_tables"]

DOCUMENT = Path(__file__).parent.parent / "docs" / "compatibility.md"
_BODIES: Mapping[str, type[Body]] = {"chat": ChatBody, "completions": CompletionBody}


def document_with_tables(document: str) -> str:
    """Return the document with the tables that the code says."""
    for name, rows in (
        ("supported", _supported()),
        ("ignored", _ignored()),
        ("rejected", _rejected()),
        ("absent endpoints", _absent()),
    ):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = document.partition(begin)
        _, found, after = rest.partition(end)
        assert found, f"The document has no place for {name}."
        document = f"{before}{begin}{chr(10).join(rows)}\n{end}{after}"
    return document


def _supported() -> Iterable[str]:
    yield "| parameter | endpoints | |"
    yield "| --- | --- | --- |"
    names = sorted({name for body in _BODIES.values() for name in body.model_fields})
    for name in names:
        yield f"| `{name}` | {_endpoints(name, 'model_fields')} | {_description(name)} |"


def _description(name: str) -> str:
    """Return what a parameter does, with the endpoint where endpoints differ."""
    texts = {
        label: body.model_fields[name].description or ""
        for label, body in _BODIES.items()
        if name in body.model_fields
    }
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return " ".join(f"{label.capitalize()}: {text}" for label, text in texts.items())


def _ignored() -> Iterable[str]:
    yield "| parameter | endpoints | why it has no effect |"
    yield "| --- | --- | --- |"
    for name, reason in _merged("ignored"):
        yield f"| `{name}` | {_endpoints(name, 'ignored')} | {reason} |"


def _rejected() -> Iterable[str]:
    yield "| parameter | endpoints | accepted value | alternative, or reason |"
    yield "| --- | --- | --- | --- |"
    names = {name for table in ("defaults", "rejected") for name, _ in _merged(table)}
    reasons, defaults = dict(_merged("rejected")), dict(_merged("defaults"))
    for name in sorted(names):
        values = ", ".join(f"`{_json(value)}`" for value in defaults.get(name, ()))
        table = "rejected" if name in reasons else "defaults"
        yield f"| `{name}` | {_endpoints(name, table)} | {values} | {reasons.get(name, '')} |"


def _absent() -> Iterable[str]:
    yield "| endpoint | alternative, or reason |"
    yield "| --- | --- |"
    for paths, reason in ABSENT:
        yield f"| {', '.join(f'`{path}`' for path in paths)} | {reason} |"


def _merged(table: str) -> list[tuple[str, Any]]:  # Any: what the tables hold
    tables: list[Mapping[str, Any]] = [getattr(body, table) for body in _BODIES.values()]
    return sorted({name: value for one in tables for name, value in one.items()}.items())


def _endpoints(name: str, table: str) -> str:
    return ", ".join(label for label, body in _BODIES.items() if name in getattr(body, table))


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace("'", '"')


def main() -> None:
    """Rewrite the document."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    DOCUMENT.write_text(document_with_tables(DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
