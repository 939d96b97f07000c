"""Strings with many escapes in JSON are parsed in steps, with the same result."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.serving.intake.steps import finish
from cluster.serving.json_bodies import escaped_strings
from cluster.serving.json_bodies.escaped_strings import EscapedStrings
from cluster.serving.json_bodies.json_body import read_json
from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.intake.steps import Steps

_STEP_BYTES = 20
PIECES = ["\\\\", '\\"', "\\n", "\\u20ac", "\\ud83d\\ude00", "\\u005c", "x", "u", "é", "€", "😀"]
texts = st.lists(st.sampled_from(PIECES), max_size=30).map(lambda pieces: f'"{"".join(pieces)}"')
values = st.recursive(
    texts | st.sampled_from(["null", "1.5", "[]"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda found: f"[{','.join(found)}]"),
        st.lists(st.tuples(texts, inner), max_size=4).map(
            lambda found: "{" + ",".join(f"{name}: {one}" for name, one in found) + "}"
        ),
    ),
    max_leaves=12,
)


def parsed(raw: bytes) -> dict[str, object]:
    def steps() -> Steps[dict[str, object]]:
        strings = EscapedStrings()
        body = json.loads((yield from strings.take_out(raw)))
        assert isinstance(body, dict)
        yield from strings.put_back(body)
        return body

    return finish(steps())


@pytest.fixture(scope="module")
def _short_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(escaped_strings, "_STEP_BYTES", _STEP_BYTES)
        yield


@pytest.mark.usefixtures("_short_pieces")
@given(values)
def test_any_body_is_read_as_a_whole_parse_reads_it(value: str) -> None:
    raw = f'{{"a":{value}}}'.encode()
    assert json.dumps(parsed(raw)) == json.dumps(json.loads(raw))


@pytest.mark.parametrize("escape", ["\\u20ac", "\\n", "\\\\", '\\"', "\\ud83d\\ude00"])
def test_two_megabytes_of_escapes_are_read_in_short_steps(escape: str) -> None:
    raw = b'{"a":"%b"}' % (escape.encode() * (2**21 // len(escape)))
    num_steps = sum(1 for _ in read_json(raw))
    assert num_steps > len(raw) / 2**15
    assert finish(read_json(raw)) == json.loads(raw)


@pytest.mark.parametrize("inside", [b"\\ud800", b"\\x", b"a\nb", b"\\u12", b"\xff"])
def test_invalid_escapes_are_rejected(inside: bytes) -> None:
    raw = b'{"a":"%b%b"}' % (b"\\n" * 40_000, inside)
    with pytest.raises(InvalidRequestError, match="valid JSON"):
        finish(read_json(raw))


def test_duplicate_names_with_escapes_are_rejected() -> None:
    raw = b'{"a":"%b","b\\n":1,"b\\u000a":2}' % (b"\\n" * 40_000)
    with pytest.raises(InvalidRequestError, match="duplicate name"):
        finish(read_json(raw))
