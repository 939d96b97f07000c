"""The blocks of code in the documents."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from markdown_it import MarkdownIt

from tests.system.server_process import ROOT

_PATHS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md")
_CONTINUED = re.compile(r"\\\n\s*")
_COMMENT = re.compile(r"(^|\s)# .*$", re.MULTILINE)


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
