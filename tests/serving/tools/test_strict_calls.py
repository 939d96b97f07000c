"""Grammars of strict tools in each format: random texts that they allow, read back."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest

from cluster.serving.reasoning import ReasoningReader
from cluster.serving.tools.forced_calls import schema_without_text
from cluster.serving.tools.tool import Tool
from cluster.serving.tools.tool_calls import LFM2_BEGIN, LFM2_END, TOOL_CALL_FORMATS
from cluster.serving.tools.tool_choice import ToolChoice, ToolUse
from cluster.structured.grammar.grammar_text import grammar_text
from cluster.structured.token_matchers import MarkMatcher, ReasoningMatcher, Vocabulary
from cluster.structured.xgrammar_library import XGrammarLibrary
from pagedray.errors import InvalidRequestError
from pagedray.request import Reasoning
from pagedray.sampling_params import Structure

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cluster.serving.tools.tool_calls import ToolCallFormat
    from cluster.serving.tools.turn_reader import TurnDelta
    from cluster.structured.token_matchers import TextMatcher, TokenMatcher

EOS = 0
MISTRAL = "[TOOL_CALLS]"
LLAMA = "<|python_tag|>"
TEXTS = (
    *("", MISTRAL, LLAMA, "</s>", "<tool_call>", "</tool_call>", "l>{", "\n", "\uff5c", "\u2581"),
    *("</parameter>", "</arg_value>"),
    *map(chr, range(32, 127)),
)
NUM_SPECIAL = 4
_ENDS = ("</parameter>", "</arg_value>", '"', "'", "")


def made_library() -> XGrammarLibrary:
    """Return xgrammar with these tokens."""
    tokens = tuple(b"" if at < NUM_SPECIAL else text.encode() for at, text in enumerate(TEXTS))
    return XGrammarLibrary(
        Vocabulary(
            tokens=tokens,
            eos_token_ids=(EOS,),
            special_token_ids={text: TEXTS.index(text) for text in TEXTS[1:NUM_SPECIAL]},
        )
    )


class Writer:
    """Writes texts that the masks of a turn with tools allow."""

    def __init__(
        self, library: XGrammarLibrary, use: ToolUse, reasoning: Reasoning | None = None
    ) -> None:
        structure = use.structure(None, None)
        assert structure is not None
        self._masks = np.zeros((1, library.num_mask_words), dtype=np.int32)
        compiled, _ = library.compile_grammar(grammar_text(structure))
        self.mark = structure.mark
        self.text = ""
        self.has_ended = False
        inner: TextMatcher = library.matcher(compiled)
        mark_id = library.special_token_ids.get(self.mark)
        if mark_id is not None:
            index = library.index if structure.kind == "calls" else None
            inner = MarkMatcher(inner, mark_id, self.mark, text_index=index)
        self._matcher: TokenMatcher = inner
        if reasoning is not None:
            self._matcher = ReasoningMatcher(inner, reasoning, library.index, eos_token_ids=(EOS,))

    def restart(self) -> None:
        """Return to the start of the turn."""
        self._matcher.reset()
        self.text = ""
        self.has_ended = False

    def allowed(self) -> list[int]:
        self._masks[:] = 0
        self._matcher.write_mask(self._masks, 0)
        bits = np.unpackbits(self._masks.view(np.uint8), count=len(TEXTS), bitorder="little")
        found: list[int] = bits.nonzero()[0].tolist()
        return found

    def write(self, tokens: Sequence[str]) -> None:
        """Write tokens, each of which must be allowed."""
        for token in tokens:
            assert TEXTS.index(token) in self.allowed(), (self.text, token)
            self._accept(TEXTS.index(token))

    def _accept(self, token_id: int) -> None:
        assert self._matcher.accept_token(token_id)
        self.text += TEXTS[token_id]

    def write_randomly(self, seed: int) -> None:
        """Write until the end, or for a while."""
        generator = random.Random(seed)
        for _ in range(500):
            allowed = self.allowed()
            ends = [one for one in allowed if TEXTS[one] in _ENDS]
            chosen = generator.choice(ends if ends and generator.random() < 0.1 else allowed)
            if chosen == EOS:
                self.has_ended = True
                return
            self._accept(chosen)


def use_of(
    tool_format: ToolCallFormat, tools: Iterable[Tool], *, is_parallel: bool = True
) -> ToolUse:
    return ToolUse([*tools], ToolChoice(is_parallel=is_parallel), tool_format=tool_format)


def read(use: ToolUse, text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the content of a turn, and the name and arguments of each call."""
    return read_pieces(use, text)


def read_pieces(use: ToolUse, pieces: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    """As `read`, for a text in pieces."""
    reader = use.reader()
    deltas: list[TurnDelta] = [*map(reader.read_piece, pieces), reader.flush()]
    calls: dict[int, list[str]] = {}
    for call in (one for delta in deltas for one in delta.calls):
        begun = calls.setdefault(call.index, [call.name or "", ""])
        begun[1] += call.arguments
    return "".join(delta.content for delta in deltas), [(a, b) for a, b in calls.values()]


LEADING_FORMATS = ("llama3_json", "llama4_pythonic", "pythonic")
"""Those in which a turn is calls or text."""
MARKED_FORMATS = [one for one in TOOL_CALL_FORMATS if one not in (*LEADING_FORMATS, "openai")]
SCHEMAS = {
    "look": {
        "type": "object",
        "properties": {"where": {"enum": ["a", 1]}, "deep": {"$ref": "#/$defs/n"}},
        "additionalProperties": False,
        "required": ["where"],
        "$defs": {"n": {"type": "integer"}},
    },
    "look.again": {"type": "object", "properties": {}, "additionalProperties": False},
}
STRICT = [Tool(name=name, parameters=one, is_strict=True) for name, one in SCHEMAS.items()]
UNSUPPORTED = {"type": "object", "properties": {"x": {"not": {"type": "null"}}}}
LOOSE = Tool(name="loose", parameters=UNSUPPORTED)
VALIDATORS = {
    name: jsonschema.Draft202012Validator(schema)
    for name, schema in (SCHEMAS | {"loose": {"type": "object"}}).items()
}


@pytest.fixture(scope="module")
def library() -> XGrammarLibrary:
    return made_library()


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("tool_format", MARKED_FORMATS)
def test_calls_behind_a_text_are_valid(
    library: XGrammarLibrary, tool_format: ToolCallFormat, is_parallel: bool
) -> None:
    use = use_of(tool_format, [*STRICT, LOOSE], is_parallel=is_parallel)
    writer = Writer(library, use)
    names, most_calls = set(), 0
    for seed in range(40):
        writer.restart()
        writer.write("a {<[ ")
        writer.write(list(writer.mark))
        writer.write_randomly(seed)
        if not writer.has_ended:
            continue
        content, calls = read(use, writer.text)
        assert content == "a {<["
        for name, arguments in calls:
            VALIDATORS[name].validate(json.loads(arguments))
        names |= {name for name, _ in calls}
        most_calls = max(most_calls, len(calls))
    assert names == {"look", "look.again", "loose"}
    assert most_calls > 1 if is_parallel else most_calls == 1


def test_text_may_end_without_a_call(library: XGrammarLibrary) -> None:
    writer = Writer(library, use_of("hermes", STRICT))
    writer.write([*"{ <tool_cal", "</tool_call>", *"l>"])
    assert EOS in writer.allowed()


def test_token_that_completes_the_mark_must_begin_a_call(library: XGrammarLibrary) -> None:
    writer = Writer(library, use_of("hermes", STRICT))
    writer.write([*"<tool_cal", "l>{"])
    assert [TEXTS[one] for one in writer.allowed()] == ["\n", " ", '"']


def test_special_token_marks_calls_behind_a_text(library: XGrammarLibrary) -> None:
    for text in ("", "ab [TOOL_"):
        writer = Writer(library, use_of("mistral", STRICT))
        writer.write([*text, MISTRAL])
        assert EOS not in writer.allowed()
        writer.write('[{"name": "look.again", "arguments": {}}]')
        assert writer.allowed() == [EOS]


def test_special_token_cannot_be_written_in_a_call(library: XGrammarLibrary) -> None:
    writer = Writer(library, use_of("mistral", [LOOSE, STRICT[0]]))
    writer.write([*MISTRAL, *'[{"name": "loose", "arguments": {"'])
    assert TEXTS.index("T") in writer.allowed()
    assert TEXTS.index(MISTRAL) not in writer.allowed()


def test_error_names_the_strict_tool() -> None:
    strict = Tool(name="strict", parameters=UNSUPPORTED, is_strict=True)
    structure = use_of("hermes", [LOOSE, strict]).structure(None, None)
    assert structure is not None
    with pytest.raises(InvalidRequestError, match="strict tool 'strict', which has an unsupported"):
        grammar_text(structure)


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("llama3_json", "  {"),
        ("llama3_json", "<|python_tag|>"),
        ("pythonic", " [ loo"),
        ("pythonic", "<|python_start|>"),
        ("llama4_pythonic", "<|python_tag|>"),
    ],
)
def test_turn_that_begins_as_calls_do_consists_of_them(
    library: XGrammarLibrary, tool_format: ToolCallFormat, text: str
) -> None:
    writer = Writer(library, use_of(tool_format, STRICT))
    for letter in text[:-1]:
        writer.write(letter)
        assert EOS in writer.allowed()
    if TEXTS.index(text[-1]) in writer.allowed():
        writer.write(text[-1])
        assert EOS not in writer.allowed()


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("llama3_json", 'a {"name": "look"} <|python_tag|>'),
        ("llama3_json", "<|python_ta g|>"),
        ("pythonic", "[1, [look(where=2)]"),
        ("pythonic", "[lo(]"),
        ("pythonic", "a [look(where=2)]"),
    ],
)
def test_text_that_begins_otherwise_is_free(
    library: XGrammarLibrary, tool_format: ToolCallFormat, text: str
) -> None:
    use = use_of(tool_format, STRICT)
    writer = Writer(library, use)
    writer.write(text)
    assert EOS in writer.allowed()
    assert read(use, writer.text) == (text, [])


def test_special_token_marks_calls_at_the_start_only(library: XGrammarLibrary) -> None:
    writer = Writer(library, use_of("llama3_json", STRICT))
    writer.write([LLAMA, *'{"name": "look.again", "parameters": {}}'])
    assert EOS in writer.allowed()
    writer.restart()
    writer.write("a")
    assert TEXTS.index(LLAMA) not in writer.allowed()


def test_tools_that_are_not_strict_are_called_freely() -> None:
    assert use_of("hermes", [LOOSE]).structure(None, None) is None


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
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
TOOLS = [
    Tool(name="put", parameters=SCHEMA, is_strict=True),
    Tool(name="get", parameters={"type": "object", "properties": {}}, is_strict=True),
]
STRINGS = ("where", "code", "kind")
"""Arguments whose schemas only allow strings."""
MARKS = ("<tool_call>", "</tool_call>")


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
    text = text.strip().removeprefix(LFM2_BEGIN).removesuffix(LFM2_END)
    found: list[Call] = eval(text, {**names, "true": True, "false": False, "null": None})
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


BEGINNINGS = {
    "lfm2": LFM2_BEGIN,
    "llama3_json": "{",
    "pythonic": "[put",
    "llama4_pythonic": "[put",
}
READERS = {
    "glm45": glm_calls,
    "lfm2": python_calls,
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
    found: dict[str, set[str]] = {name: set() for name in SCHEMA["properties"]}
    num_calls = 0
    for seed in range(120):
        writer.restart()
        writer.write(list(BEGINNINGS.get(tool_format, "<tool_call>")))
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
                VALIDATOR.validate(arguments)
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


THOUGHTS = ("", "hm", "\nI [put(x=1)]\n", '{"name": "put"}', "a </thin b", "<tool_call>")


def in_pieces(text: str, generator: random.Random) -> list[str]:
    num_cuts = min(len(text), generator.choice((0, 3, 40)))
    cuts = sorted(generator.sample(range(len(text)), k=num_cuts))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("tool_format", sorted(READERS))
def test_calls_behind_reasoning_are_valid(
    library: XGrammarLibrary, tool_format: ToolCallFormat, *, is_open: bool
) -> None:
    use = use_of(tool_format, TOOLS)
    reasoning = Reasoning(begin="<think>", end="</think>", is_open=is_open)
    writer = Writer(library, use, reasoning)
    num_calls = 0
    for seed in range(24):
        generator = random.Random(seed)
        thought = THOUGHTS[seed % len(THOUGHTS)]
        begin = "" if is_open else "<think>"
        head = f"{begin}{thought}</think>" + "\n" * generator.randrange(3)
        content = "" if tool_format in BEGINNINGS else generator.choice(("", "Sure."))
        writer.restart()
        writer.write([*head, *content, *BEGINNINGS.get(tool_format, "<tool_call>")])
        writer.write_randomly(seed)
        turn = writer.text.removeprefix(head)
        expected = READERS[tool_format](turn) if writer.has_ended else []
        if not expected or any(turn.count(mark) not in (0, len(expected)) for mark in MARKS):
            continue
        reader = ReasoningReader(reasoning)
        pieces = [*map(reader.read_piece, in_pieces(writer.text, generator)), ("", "")]
        assert "".join(before for before, _ in pieces) == thought.strip()
        read_content, calls = read_pieces(use, [behind for _, behind in pieces])
        assert [(name, json.loads(arguments)) for name, arguments in calls] == expected
        assert read_content == content
        for name, arguments in expected:
            num_calls += 1
            if name == "put":
                VALIDATOR.validate(arguments)
    assert num_calls > 5


NAMED_AS_KEYWORDS = {"title": {"type": "string"}, "default": {"enum": [{"description": 1}]}}
DESCRIBED = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Search",
    "type": "object",
    "description": "Finds things.",
    "properties": {
        "query": {"type": "string", "description": "What to find.", "examples": ["a"]},
        "title": {"type": "string", "title": "Title"},
        "default": {"enum": [{"description": 1}], "default": {"description": 1}},
        "either": {
            "anyOf": [{"$ref": "#/$defs/place", "description": "A place."}, {"type": "null"}],
            "default": None,
        },
        "many": {"type": "array", "items": {"type": "integer", "description": "One."}},
    },
    "required": ["query", "title"],
    "additionalProperties": False,
    "$defs": {"place": {"description": "A place.", "type": "object", "properties": {}}},
}
BARE = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        **NAMED_AS_KEYWORDS,
        "either": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        "many": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["query", "title"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {}}},
}


def test_only_what_restricts_no_value_is_left_out() -> None:
    assert schema_without_text(DESCRIBED) == BARE


def test_the_grammar_is_the_same() -> None:
    described, bare = (
        grammar_text(Structure(kind="json_schema", text=json.dumps(schema)))
        for schema in (DESCRIBED, schema_without_text(DESCRIBED))
    )
    assert described == bare


@pytest.mark.parametrize("odd", [{"properties": 5}, {"anyOf": {"a": 1}}, {"items": True}])
def test_invalid_parts_are_kept(odd: dict[str, object]) -> None:
    assert schema_without_text(odd) == odd
