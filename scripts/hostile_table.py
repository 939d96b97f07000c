"""Write the table of attacks in docs/security.md from the results of `python -m tests.hostile`.

python -m scripts.hostile_table
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.hostile.catalog import ATTACKS

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["document_with_table"]

_ROOT = Path(__file__).parent.parent
DOCUMENT = _ROOT / "docs" / "security.md"
RESULTS = _ROOT / "bench" / "results" / "hostile.json"
_BEGIN, _END = "<!-- attacks -->\n", "<!-- end of attacks -->"


def document_with_table(document: str, results: dict[str, Any]) -> str:  # Any: parsed JSON
    """Return the document with the table of the results."""
    before, _, rest = document.partition(_BEGIN)
    _, found, after = rest.partition(_END)
    assert found, "The document has no place for the table."
    return f"{before}{_BEGIN}{chr(10).join(_lines(results))}\n{_END}{after}"


def _lines(results: dict[str, Any]) -> Iterator[str]:  # Any: as above
    yield f"`{results['command']}`, {results['cpu']}, {results['date']}:"
    yield ""
    yield (
        "| attack | tokens alone, ms | beside, ms | ratio | health checks, ms | "
        "memory, MiB | held after, MiB |"
    )
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, attack in sorted(ATTACKS.items()):
        if name in results:
            yield _row(attack.name, results[name])


def _row(name: str, figures: dict[str, Any]) -> str:  # Any: as above
    alone, beside = (figures[f"gaps_{when}"]["p99_ms"] for when in ("before", "beside"))
    health = figures["health_beside"]["p99_ms"]
    before_mib, peak_mib, after_mib = figures["rss_mib"]
    grown_mib, kept_mib = max(0, peak_mib - before_mib), max(0, after_mib - before_mib)
    ratios = figures.get("gap_ratios", [round(beside / alone, 2)])
    return (
        f"| {name} | {alone:.1f} | {beside:.1f} | {', '.join(map(str, ratios))} | "
        f"{health:.0f} | {grown_mib} | {kept_mib} |"
    )


def main() -> None:
    """Rewrite the document."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    results = json.loads(RESULTS.read_text())
    DOCUMENT.write_text(document_with_table(DOCUMENT.read_text(), results))


if __name__ == "__main__":
    main()
