"""Checks of commands that are not run: their files, flags and names exist.

The words of a command are what a shell passes to the program, which is found in `CHECKS`.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import pytest
import yaml
from markdown_it import MarkdownIt

from cluster.cli.parser import make_parser
from cluster.serving.admin.openapi import openapi_document
from cluster.serving.ray_serve.options import read_arguments
from pagedray.v1 import pagedray_pb2 as pb
from tests.chaos.faults import FAULTS
from tests.deploy.kustomize import DEPLOY, overlay
from tests.system.server_process import ROOT

_EXTERNAL_PACKAGES = frozenset(("checkov", "torch"))
_EXAMPLES = {"FAULT": FAULTS[0].__name__}
"""What stands for the values that a reader chooses."""
_PARSE_ARGS = argparse.ArgumentParser.parse_args
_KINDS = ("service", "pod", "deployment", "rayservice", "raycluster")
_PATHS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md")
_CONTINUED = re.compile(r"\\\n\s*")
_COMMENT = re.compile(r"(^|\s)# .*$", re.MULTILINE)


def check_command(words: Sequence[str]) -> None:
    """Raise AssertionError if a command names a flag, a file or an object that does not exist."""
    program = Path(words[0]).name
    assert program in CHECKS, f"There is no check for {program}: add it to CHECKS."
    CHECKS[program](words[1:])


def _pagedray(words: Sequence[str]) -> None:
    error = io.StringIO()
    try:
        with contextlib.redirect_stderr(error):
            make_parser().parse_args(words)
    except SystemExit as exit:
        raise AssertionError(error.getvalue()) from exit


def _python(words: Sequence[str]) -> None:
    # A file that is run by its path would not find the modules beside its folder.
    assert words[0] == "-m", f"Run {words[0]} as a module."
    module, *arguments = words[1:]
    path = ROOT.joinpath(*module.split("."))
    found = [one for one in (path.with_suffix(".py"), path / "__main__.py") if one.is_file()]
    if not found:
        assert importlib.util.find_spec(module) is not None, f"There is no module {module}."
        return
    arguments = [_EXAMPLES.get(word, word) for word in arguments]
    error = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(error):
        patch.setattr(sys, "argv", [module, *arguments])
        patch.setattr(argparse.ArgumentParser, "parse_args", _parse_and_stop)
        try:
            runpy.run_path(str(found[0]), run_name="__main__")
        except _ParsedError:
            return
        except SystemExit as exit:
            raise AssertionError(error.getvalue()) from exit
    raise AssertionError(f"{module} has no flags.")


class _ParsedError(Exception):
    """Arguments are valid; the program ends there."""


def _parse_and_stop(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> NoReturn:
    _PARSE_ARGS(parser, arguments)
    raise _ParsedError


def _pip(words: Sequence[str]) -> None:
    assert words[0] == "install", words
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words[1:]:
        if found := re.fullmatch(r"\.\[(.+)\]", word):
            assert set(found[1].split(",")) <= extras["optional-dependencies"].keys(), word
        elif word not in (".", "-e", "--index-url") and not word.startswith("https://"):
            assert word in _EXTERNAL_PACKAGES, f"Is {word} a package?"


def _make(words: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_setting, _ = word.partition("=")
        wanted = f"^{name} \\?=" if is_setting else f"^{name}:"
        assert re.search(wanted, makefile, re.MULTILINE), f"The Makefile has no {word}."


def _curl(words: Sequence[str]) -> None:
    (url,) = (word for word in words if word.startswith("http"))
    paths = openapi_document()["paths"]
    assert isinstance(paths, dict)
    assert urlsplit(url).path in paths, url
    if "-d" in words:
        json.loads(words[words.index("-d") + 1])


def _buf(words: Sequence[str]) -> None:
    assert words[0] == "curl", words
    _check_method(urlsplit(words[-1]).path[1:])


def _grpcurl(words: Sequence[str]) -> None:
    _check_method(words[-1])
    folder, proto = (words[words.index(flag) + 1] for flag in ("-import-path", "-proto"))
    assert (ROOT / folder / proto).is_file(), proto


def _check_method(path: str) -> None:
    service, _, method = path.rpartition(".")[2].partition("/")
    assert method in pb.DESCRIPTOR.services_by_name[service].methods_by_name, path


def _docker(words: Sequence[str]) -> None:
    if words[0] != "build":
        return
    text = (ROOT / words[words.index("-f") + 1]).read_text()
    target = words[words.index("--target") + 1]
    assert re.search(rf"^FROM .+ AS {target}$", text, re.MULTILINE), target


def _helm(words: Sequence[str]) -> None:
    _check_paths(words)
    for flag, word in pairwise(words):
        if flag == "--set":
            assert _has_value(DEPLOY / "helm/pagedray/values.yaml", word.partition("=")[0]), word


def _has_value(path: Path, key: str) -> bool:
    values = yaml.safe_load(path.read_text())
    for name in key.split("."):
        if not isinstance(values, dict) or name not in values:
            return False
        values = values[name]
    return True


def _kubectl(words: Sequence[str]) -> None:
    _check_paths(words)
    for first, second in pairwise((*words, "")):
        kind, _, name = first.partition("/")
        if kind in _KINDS:
            name = name or second
            assert name.startswith("-") or name in _object_names(), f"There is no {name}."


@cache
def _object_names() -> frozenset[str]:
    """Return the names in the manifests, and those that KubeRay derives."""
    manifests = overlay("gpu-1")
    names = {name for _, name in manifests}
    names |= {f"{name}-serve-svc" for kind, name in manifests if kind == "RayService"}
    for path in (DEPLOY / "kuberay").rglob("*.yaml"):
        names |= set(re.findall(r"^\s+name: (\S+)$", path.read_text(), re.MULTILINE))
    return frozenset(names)


def _check_paths(words: Sequence[str]) -> None:
    for word in words:
        if word.startswith("deploy/"):
            assert (ROOT / word).exists(), f"There is no {word}."


def _serve(words: Sequence[str]) -> None:
    assert words[0] == "run", words
    (index,) = (number for number, word in enumerate(words) if ":" in word)
    assert words[index] == "pagedray:build_app"
    read_arguments(dict(word.split("=", 1) for word in words[index + 1 :]))


def _taskset(words: Sequence[str]) -> None:
    check_command(words[2:])


def _nothing(_: Sequence[str]) -> None:
    """A program of which the documents name no part of ours."""


CHECKS: Mapping[str, Callable[[Sequence[str]], None]] = {
    "buf": _buf,
    "checkov": _nothing,
    "chmod": _nothing,
    "curl": _curl,
    "docker": _docker,
    "grpcurl": _grpcurl,
    "helm": _helm,
    "kubectl": _kubectl,
    "make": _make,
    "pagedray": _pagedray,
    "pip": _pip,
    "python": _python,
    "python3": _python,
    "serve": _serve,
    "taskset": _taskset,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of code."""

    path: str
    """The document, from the root."""
    language: str
    """What follows the fence; empty for an indented block."""
    text: str

    @property
    def key(self) -> str:
        """The document and the first line, by which tables name the block."""
        return f"{self.path}: {self.text.strip().splitlines()[0]}"

    def commands(self) -> list[list[str]]:
        """Return the words of each command of a shell's block."""
        text = _COMMENT.sub("", _CONTINUED.sub(" ", self.text))
        lexer = shlex.shlex(text, posix=True, punctuation_chars="\n&|;<>")
        lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
        commands: list[list[str]] = [[]]
        for word in lexer:
            if set(word) <= set("\n&|;"):
                commands.append([])
            else:
                commands[-1].append(word)
        return [words for words in commands if words]


def _blocks() -> Iterator[Block]:
    markdown = MarkdownIt()
    paths = {path for pattern in _PATHS for path in ROOT.glob(pattern)}
    for path in sorted(paths):
        for token in markdown.parse(path.read_text()):
            if token.type in ("fence", "code_block"):
                name = str(path.relative_to(ROOT))
                yield Block(path=name, language=token.info.strip(), text=token.content)


BLOCKS = tuple(_blocks())
