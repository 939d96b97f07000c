"""Values of clients in JSON, up to a length."""

from __future__ import annotations

import pytest

from cluster.serving.json_body import json_text
from pagedray.errors import InvalidRequestError

VALUE = {"k\u00f6ln": [1, 2.5, True, None, 2**70], "\U0001f642": {"a": "\n"}}
TEXT = '{"k\u00f6ln":[1,2.5,true,null,1180591620717411303424],"\U0001f642":{"a":"\\n"}}'


def test_text_may_have_the_most_bytes() -> None:
    num_bytes = len(TEXT.encode())
    assert json_text(VALUE, "schema", most_bytes=num_bytes) == TEXT
    with pytest.raises(InvalidRequestError, match=f"at most {num_bytes - 1} bytes") as rejected:
        json_text(VALUE, "schema", most_bytes=num_bytes - 1)
    assert rejected.value.param == "schema"


def test_a_number_that_json_lacks_is_rejected() -> None:
    with pytest.raises(InvalidRequestError, match="cannot represent"):
        json_text([float("inf")], "schema", most_bytes=100)
