"""Pages of the documentation that are made from the code, as a hook of MkDocs."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc_tools
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc
from mkdocs.structure.files import File

from cluster.cli.engine_flags import flag_notes
from cluster.cli.parser import command_parser, make_parser
from cluster.serving.admin.openapi import openapi_document

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Iterator, Mapping, Sequence

    from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

__all__ = ["on_files", "site_pages"]

_PROTOS = Path(__file__).parents[1] / "protos"
_LIBRARY_PROTOS = Path(grpc_tools.__file__).parent / "_proto"
_PROTO = "pagedray/v1/pagedray.proto"
_COMMANDS = ("serve", "generate", "chat", "bench", "simulate", "deploy", "top", "keys")
# Fields of descriptors, by which places in a file are named.
_MESSAGES, _ENUMS, _SERVICES, _MEMBERS, _FIELDS, _VALUES = 4, 5, 6, 2, 2, 2
_TYPES = ("", "double", "float", "int64", "uint64", "int32", "", "", "bool", "string", "", "")
_TYPE_NAMES = {number: name for number, name in enumerate(_TYPES) if name} | {
    12: "bytes",
    13: "uint32",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to those of the folder."""
    for path, content in site_pages().items():
        files.append(File.generated(config, path, content=content))
    return files


def site_pages() -> dict[str, str]:
    """Return the contents of pages by their paths."""
    document = openapi_document()
    return {
        "reference/command-line.md": _page("Command line", _command_line()),
        "reference/grpc.md": _page("gRPC", _grpc()),
        "reference/http.md": _page("HTTP", _http(document)),
        "reference/openapi.json": json.dumps(document, indent=1),
        "reference/vllm.md": _page("Coming from vLLM", _vllm()),
    }


def _page(title: str, lines: Iterator[str]) -> str:
    return "\n".join((f"# {title}", "", *lines, ""))


def _command_line() -> Iterator[str]:
    parser = make_parser()
    yield "`pagedray completion bash` prints a script that completes commands and flags.\n"
    for name in _COMMANDS:
        command = command_parser(parser, name)
        yield from _help(command, "##")
        for verb in _verbs(command):
            yield from _help(command_parser(command, verb), "###")


def _help(command: ArgumentParser, mark: str) -> Iterator[str]:
    yield f"{mark} {command.prog}\n"
    yield f"```text\n{command.format_help().strip()}\n```\n"


def _verbs(command: ArgumentParser) -> Iterator[str]:
    """Yield the second words of a command, such as `throughput` of `bench`."""
    for action in command._actions:
        if isinstance(action.choices, dict):
            yield from action.choices


def _vllm() -> Iterator[str]:
    yield (
        "`pagedray serve` and `LLM` take most of vLLM's names: [Compatibility](../compatibility.md)"
        " lists the parameters of requests, and how results differ. This page lists flags; options "
        "of `LLM` have the same names with underscores. Flags such as `--max-model-len` that are "
        "the same here are not listed; the [command line](command-line.md) has them.\n"
    )
    yield (
        "Without API keys, a server only answers HTTP requests for an IP address or `localhost`, "
        "so that pages of other sites cannot use it through a browser. If clients reach it by a "
        "name, as in a compose file, start it with `--allowed-hosts NAME`, or with `--api-key`; "
        "otherwise they get status 421.\n"
    )
    yield "| flag of vLLM | in PagedRay |\n| --- | --- |"
    for flag, note in flag_notes(command_parser(make_parser(), "serve")):
        yield f"| `{flag}` | {note} |"


def _http(document: Mapping[str, Any]) -> Iterator[str]:  # Any: JSON, here and below
    yield (
        "Errors have the shape of the API that was called. A running server has this page at "
        "`/docs`, and the [OpenAPI document](openapi.json) at `/openapi.json`.\n"
    )
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"## {method.upper()} {path}\n"
            yield f"{operation.get('description') or operation['summary']}\n"
            body = operation.get("requestBody")
            if body is not None:
                schema = body["content"]["application/json"]["schema"]
                yield from _fields(schema["$ref"].rpartition("/")[2], document)


def _fields(name: str, document: Mapping[str, Any]) -> Iterator[str]:
    schema = document["components"]["schemas"][name]
    required = schema.get("required", ())
    yield "| field | type | |\n| --- | --- | --- |"
    for field, one in sorted(schema.get("properties", {}).items()):
        mark = " (required)" if field in required else ""
        text = one.get("description", "").replace("|", "\\|")
        yield f"| `{field}`{mark} | {_type_of(one)} | {text} |"
    yield ""


def _type_of(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type_of, schema["anyOf"])))
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(kind)
    return f"list of {_type_of(schema['items'])}" if kind == "array" and "items" in schema else kind


def _grpc() -> Iterator[str]:
    file = _descriptor()
    comments = {
        tuple(one.path): one.leading_comments.strip() for one in file.source_code_info.location
    }
    for index, service in enumerate(file.service):
        yield f"{_comment(comments, (_SERVICES, index))}\n"
        yield f"## {service.name}\n"
        for number, method in enumerate(service.method):
            stream = "stream of " if method.server_streaming else ""
            asked, answered = map(_short, (method.input_type, method.output_type))
            yield f"### {method.name}\n"
            yield f"[`{asked}`](#{asked.lower()}) to {stream}[`{answered}`](#{answered.lower()})\n"
            yield f"{_comment(comments, (_SERVICES, index, _MEMBERS, number))}\n"
    yield "## Messages\n"
    for index, message in enumerate(file.message_type):
        yield f"### {message.name}\n"
        yield f"{_comment(comments, (_MESSAGES, index))}\n"
        yield from _message_table(message, comments, (_MESSAGES, index))
    yield "## Enums\n"
    for index, enum in enumerate(file.enum_type):
        yield f"### {enum.name}\n\n{_comment(comments, (_ENUMS, index))}\n"
        yield "| value | number | |\n| --- | --- | --- |"
        for number, value in enumerate(enum.value):
            text = _comment(comments, (_ENUMS, index, _VALUES, number))
            yield f"| `{value.name}` | {value.number} | {text} |"
        yield ""


def _descriptor() -> FileDescriptorProto:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "protos.binpb"
        arguments = ["protoc", f"-I{_PROTOS}", f"-I{_LIBRARY_PROTOS}", "--include_source_info"]
        assert protoc.main([*arguments, f"--descriptor_set_out={output}", _PROTO]) == 0
        (file,) = FileDescriptorSet.FromString(output.read_bytes()).file
    return file


def _message_table(
    message: DescriptorProto, comments: Mapping[tuple[int, ...], str], path: tuple[int, ...]
) -> Iterator[str]:
    if not message.field:
        return
    entries = {one.name: one for one in message.nested_type}
    yield "| field | type | number | |\n| --- | --- | --- | --- |"
    for number, field in enumerate(message.field):
        entry = entries.get(_short(field.type_name))
        if entry is not None:
            key, value = (_field_type(one) for one in entry.field)
            kind = f"map of {key} to {value}"
        else:
            repeated = field.label == field.LABEL_REPEATED
            kind = f"repeated {_field_type(field)}" if repeated else _field_type(field)
        text = _comment(comments, (*path, _FIELDS, number))
        yield f"| `{field.name}` | {kind} | {field.number} | {text} |"
    yield ""


def _field_type(field: Any) -> str:  # Any: a FieldDescriptorProto
    if not field.type_name:
        return _TYPE_NAMES[field.type]
    name = _short(field.type_name)
    is_own = field.type_name.startswith(".pagedray.")
    return f"[`{name}`](#{name.lower()})" if is_own else f"`{name}`"


def _comment(comments: Mapping[tuple[int, ...], str], path: Sequence[int]) -> str:
    text = comments.get(tuple(path), "")
    paragraphs = [" ".join(one.split()) for one in text.split("\n\n")]
    return "<br>".join(paragraphs) if len(path) > 2 else "\n\n".join(paragraphs)


def _short(name: str) -> str:
    return name.rpartition(".")[2]
