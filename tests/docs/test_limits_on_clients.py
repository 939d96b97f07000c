"""Both tables of the limits on clients, that for users and that of the code, have the same rows."""

from __future__ import annotations

from tests.system.server_process import ROOT

_HEADER = "| a client cannot |"


def _rows(document: str) -> list[str]:
    """Return the first cells of the table of limits in a document."""
    _, _, table = (ROOT / "docs" / document).read_text().partition(_HEADER)
    lines = table.partition("\n\n")[0].splitlines()[2:]
    return [line.removeprefix("| ").partition(" | ")[0] for line in lines]


def test_the_code_of_each_limit_is_documented() -> None:
    assert _rows("security.md") == _rows("design/serving.md") != []
