"""Long lists in JSON are parsed in steps, with the same result."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.serving.intake.steps import finish
from cluster.serving.json_bodies.json_body import read_json
from cluster.serving.json_bodies.long_lists import LongLists
from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from cluster.serving.intake.steps import Steps

LONG = list(range(3000))


def parsed(raw: bytes) -> dict[str, object]:
    def steps() -> Steps[dict[str, object]]:
        lists = LongLists()
        body = json.loads((yield from lists.take_out(raw)))
        assert isinstance(body, dict)
        yield from lists.put_back(body)
        return body

    return finish(steps())


texts = st.text(alphabet="[]{},:0 x\\n").map(lambda text: text.replace("\\", ""))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts | st.just(LONG),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(texts, values, max_size=4), st.sampled_from([None, 1]))
def test_any_body_is_read_as_a_whole_parse_reads_it(
    body: dict[str, object], indent: int | None
) -> None:
    raw = json.dumps(body, indent=indent).encode()
    assert parsed(raw) == body


@pytest.mark.parametrize(
    "prompts",
    [
        [[5] * 100_000, [6, 7], [8] * 100_000],
        [[5] * 1000] * 128,
        [[5] * 400] * 2048,
        [[5] * 9] * 8000,
    ],
    ids=["long", "prompts", "texts", "short"],
)
def test_a_body_of_many_prompts_is_read(prompts: list[list[int]]) -> None:
    body = {"prompt": prompts, "stop": ["\n", "],["]}
    assert finish(read_json(json.dumps(body).encode())) == body


@pytest.mark.parametrize("bad", [b"1,,2", b"1,2,", b"1 2", b"1,x", b"NaN,1"])
@pytest.mark.parametrize("is_last", [False, True])
def test_invalid_lists_are_rejected(bad: bytes, is_last: bool) -> None:
    numbers = b",".join([b"7"] * 70_000)
    inside = b"%b,%b" % ((numbers, bad) if is_last else (bad, numbers))
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        finish(read_json(b'{"prompt": [%b]}' % inside))


def test_a_comma_at_the_end_of_a_step_is_rejected() -> None:
    with pytest.raises(ValueError, match="trailing comma"):
        parsed(b'{"a":[%b9,]}' % (b"7," * 2**14))


def test_clients_cannot_have_a_list_put_in_place_of_a_string() -> None:
    body: dict[str, object] = {"a": ["0"], "b": LONG, "c": ["x0"]}
    assert parsed(json.dumps(body).encode()) == body


def test_many_values_outside_of_lists_of_numbers_are_rejected() -> None:
    body = {"prompt": ["x", *[1] * 70_000]}
    with pytest.raises(InvalidRequestError, match="outside of long lists"):
        finish(read_json(json.dumps(body).encode()))
