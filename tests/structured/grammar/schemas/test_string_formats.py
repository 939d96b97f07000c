"""Strings of each format are valid to parsers of other authors, and have the lengths it states."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import random
import uuid
from typing import TYPE_CHECKING, Any

import pydantic
import pytest

from cluster.structured.grammar.schemas.string_formats import STRING_FORMATS
from pagedray.structure import Structure
from tests.structured.conftest import EOS
from tests.structured.grammar.schemas.random_schemas import random_text

if TYPE_CHECKING:
    from cluster.serving.text.tokenizer import Tokenizer
    from cluster.structured.processes.compiler import StructureCompiler


# Any: types of all kinds.
PARSERS: dict[str, Any] = {
    "date": datetime.date,
    "time": datetime.time,
    "date-time": datetime.datetime,
    "duration": datetime.timedelta,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uri": pydantic.HttpUrl,
    "uuid": uuid.UUID,
}


@pytest.mark.parametrize("name", STRING_FORMATS)
def test_strings_of_a_format_are_valid(
    compiler: StructureCompiler, tokenizer: Tokenizer, name: str
) -> None:
    found = STRING_FORMATS[name]
    schema = {
        "type": "string",
        "format": name,
        "minLength": found.min_length,
        "maxLength": found.max_length,
    }
    text = json.dumps(schema)
    grammar = asyncio.run(compiler.compile(Structure(kind="json_schema", text=text)))
    generator = random.Random(1)
    texts = [random_text(grammar, tokenizer, generator, eos=EOS) for _ in range(40)]
    strings = [json.loads(text) for text in texts if text is not None]
    assert len(strings) > 20
    lengths = [len(one) for one in strings]
    assert found.min_length <= min(lengths)
    assert max(lengths) <= found.max_length
    parser = pydantic.TypeAdapter(PARSERS.get(name, str))
    for one in strings:
        parser.validate_json(json.dumps(one))


def test_the_types_of_pydantic_have_formats() -> None:
    class Event(pydantic.BaseModel):
        """What programs ask for."""

        page: pydantic.HttpUrl
        length: datetime.timedelta
        address: ipaddress.IPv6Address

    properties = Event.model_json_schema()["properties"]
    assert {one["format"] for one in properties.values()} <= STRING_FORMATS.keys()
