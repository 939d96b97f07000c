"""Calls of strict tools in each format, read by a reader of the test and by the server's."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from cluster.serving.tools.tool import Tool
from cluster.structured.grammar.grammar_text import grammar_text
from pagedray.errors import InvalidRequestError
from tests.serving.tools.strict_writer import Writer, made_library, read, use_of

if TYPE_CHECKING:
    from cluster.serving.tools.tool_calls import ToolCallFormat
    from cluster.structured.xgrammar_library import XGrammarLibrary

Call = tuple[str, dict[str, Any]]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "where": {"type": "string"},
        "code": {"type": "string", "pattern": "^[a-z<]{2,4}$"},
        "kind": {"$ref": "#/$defs/kind"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"enum": ["x", 5, "5", None, "null", True, "a <b"]},
        "few": {"type": ["string", "null"], "maxLength": 3},
        "count": {"type": "integer", "minimum": 3, "maximum": 40},
        "is_new": {"type": "boolean"},
        "items": {
            "type": "array",
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {"s": {"type": "string"}, "none": {"type": "null"}},
                "required": ["s", "none"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["kind", "either", "few", "count", "items"],
    "additionalProperties": False,
    "$defs": {"kind": {"type": "string", "enum": ["5", "a<b", "null", "c\nd", '"e"']}},
}
TOOLS = [
    Tool(name="put", parameters=SCHEMA, is_strict=True),
    Tool(name="get", parameters={"type": "object", "properties": {}}, is_strict=True),
]
STRINGS = ("where", "code", "kind")
"""Arguments whose schemas only allow strings."""
MARKS = ("<tool_call>", "</tool_call>")


@pytest.fixture(scope="module")
def library() -> XGrammarLibrary:
    return made_library()


def llama_calls(text: str) -> list[Call]:
    decoder, rest, calls = json.JSONDecoder(), text, []
    while rest := rest.lstrip(" \n\t;"):
        call, end = decoder.raw_decode(rest)
        calls.append((call["name"], call["parameters"]))
        rest = rest[end:]
    return calls


def python_calls(text: str) -> list[Call]:
    """Have Python evaluate the list."""
    names = {tool.name: lambda _name=tool.name, **given: (_name, given) for tool in TOOLS}
    found: list[Call] = eval(text.strip(), {**names, "true": True, "false": False, "null": None})
    return found


def qwen_calls(text: str) -> list[Call]:
    return _element_calls(
        text,
        r"<tool_call>\s*<function=([^>]*)>(.*?)</function>\s*</tool_call>",
        r"<parameter=([^>]*)>\n(.*?)\n?</parameter>",
    )


def glm_calls(text: str) -> list[Call]:
    return _element_calls(
        text,
        r"<tool_call>\s*([\w.]*)(.*?)</tool_call>",
        r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
    )


def _element_calls(text: str, call: str, argument: str) -> list[Call]:
    return [
        (
            name,
            {key: _value(key, value) for key, value in re.findall(argument, inside, re.DOTALL)},
        )
        for name, inside in re.findall(call, text, re.DOTALL)
    ]


def _value(key: str, text: str) -> object:
    if key in STRINGS:
        return text
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    is_text = key == "maybe" and not isinstance(value, str) and value is not None
    return text if is_text else value


READERS = {
    "glm45": glm_calls,
    "llama3_json": llama_calls,
    "llama4_pythonic": python_calls,
    "pythonic": python_calls,
    "qwen3_coder": qwen_calls,
    "qwen3_xml": qwen_calls,
}


@pytest.mark.parametrize("tool_format", sorted(READERS))
def test_calls_are_valid_for_another_reader(
    library: XGrammarLibrary, tool_format: ToolCallFormat
) -> None:
    use = use_of(tool_format, TOOLS)
    writer = Writer(library, use)
    beginning = {"llama3_json": "{", "pythonic": "[put", "llama4_pythonic": "[put"}
    found: dict[str, set[str]] = {name: set() for name in SCHEMA["properties"]}
    num_calls = 0
    for seed in range(120):
        writer.restart()
        writer.write(list(beginning.get(tool_format, "<tool_call>")))
        writer.write_randomly(seed)
        if not writer.has_ended:
            continue
        calls = READERS[tool_format](writer.text)
        if any(writer.text.count(mark) not in (0, len(calls)) for mark in MARKS):
            # The regular expressions do not read marks in values.
            continue
        _, read_calls = read(use, writer.text)
        assert [(name, json.loads(arguments)) for name, arguments in read_calls] == calls
        for name, arguments in calls:
            num_calls += 1
            if name == "put":
                jsonschema.validate(arguments, SCHEMA)
                for key, value in arguments.items():
                    found[key].add(str(value))
    assert num_calls > 20
    assert all(found.values())
    assert {"5", "None", "null"} <= found["either"]


@pytest.mark.parametrize(
    ("tool_format", "schema", "reason"),
    [
        ("pythonic", {"properties": {"a-b": {}}}, "#/properties/a-b has a name that Python"),
        ("pythonic", {"properties": {"class": {}}}, "#/properties/class has a name that Python"),
        ("qwen3_coder", {"properties": {"a>": {}}}, "#/properties/a> must have a name"),
        ("glm45", {"properties": {"": {}}}, "#/properties/ must have a name"),
        ("glm45", {"anyOf": [{"type": "object"}]}, "# must be an object with properties"),
        ("glm45", {"additionalProperties": {"type": "null"}}, "#/additionalProperties must be"),
        ("pythonic", {"propertyNames": {"maxLength": 2}}, "#/propertyNames requires properties"),
        (
            "qwen3_xml",
            {"properties": {"a": {"type": "string", "pattern": "<"}}},
            "requires '<' in a string",
        ),
        (
            "qwen3_xml",
            {"properties": {"a": {"enum": ["</parameter>"]}}},
            "#/properties/a has a value with </parameter>",
        ),
    ],
)
def test_schema_that_a_format_cannot_express_is_rejected(
    tool_format: ToolCallFormat, schema: dict[str, Any], reason: str
) -> None:
    tool = Tool(name="put", parameters=schema, is_strict=True)
    structure = use_of(tool_format, [tool]).structure(None, None)
    assert structure is not None
    with pytest.raises(InvalidRequestError, match=re.escape(reason)):
        grammar_text(structure)


@pytest.mark.parametrize("tool_format", ["glm45", "llama3_json", "pythonic", "qwen3_coder"])
def test_tool_without_properties_takes_any_arguments(
    library: XGrammarLibrary, tool_format: ToolCallFormat
) -> None:
    use = use_of(tool_format, [Tool(name="any", parameters={"type": "object"}, is_strict=True)])
    writer = Writer(library, use)
    text, arguments = {
        "glm45": (
            "<tool_call>any<arg_key>a b</arg_key><arg_value>x\n</arg_value></tool_call>",
            "x\n",
        ),
        "llama3_json": ('{"name": "any", "parameters": {"a b": "x\\n"}}', "x\n"),
        "pythonic": ("[any(a_b='x\\n')]", "x\n"),
        "qwen3_coder": (
            "<tool_call><function=any><parameter=a b>\nx\n</parameter></function></tool_call>",
            "x",
        ),
    }[tool_format]
    writer.write(text)
    ((name, given),) = read(use, text)[1]
    assert (name, list(json.loads(given).values())) == ("any", [arguments])


def test_reader_of_elements_reads_a_value_as_its_definition_says() -> None:
    parameters = {
        "properties": {"a": {"$ref": "#/$defs/text"}, "b": {"anyOf": [{}, {"type": "string"}]}},
        "$defs": {"text": {"enum": ["1", "2"]}},
    }
    use = use_of("glm45", [Tool(name="f", parameters=parameters)])
    values = {"a": "1", "b": '{"c": 1}'}
    elements = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in values.items()
    )
    assert read(use, f"<tool_call>f{elements}</tool_call>") == (
        "",
        [("f", '{"a": "1", "b": {"c": 1}}')],
    )


def test_number_beyond_the_range_of_json_is_a_string() -> None:
    use = use_of("glm45", [Tool(name="f", parameters={"properties": {"a": {"type": "number"}}})])
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>1e999</arg_value></tool_call>"
    assert read(use, text) == ("", [("f", '{"a": "1e999"}')])
