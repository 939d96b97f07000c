"""The limits of connections in the documentation are those that are enforced."""

from __future__ import annotations

import re

import pytest

from cluster.serving.listener import MAX_TOTAL
from cluster.serving.rpc.server import MIN_STREAMS
from tests.system.server_process import ROOT


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
