"""The body of a request, as any ASGI server passes it."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from cluster.serving.http.body import declared_length


@pytest.mark.parametrize(
    ("given", "length"),
    [
        ("5", 5),
        ("0", 0),
        ("00", 0),
        ("5 ", 5),
        ("\t5", 5),
        ("0" * 30 + "5", 5),
        ("9" * 5000, int("9" * 20)),
        ("", None),
        ("+5", None),
    ],
)
def test_length_that_a_request_declares(given: str, length: int | None) -> None:
    assert declared_length(Headers({"content-length": given})) == length
