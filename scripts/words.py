"""Count backward-pointing words in docstrings and comments of the product, and limit them.

python -m scripts.words              prints the figures, and fails above the limit
python -m scripts.words --list DIR   prints each place in a file or folder

CONTRIBUTING.md ("English") asks for nouns in place of these words.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["PATTERNS", "counted_words", "prose_of"]

ROOT = Path(__file__).parent.parent
PACKAGES = ("attention", "cluster", "pagedray", "workers")

LIMIT = 0.6
"""For each of the patterns, per 1 000 words of the whole product."""

# Words that follow the pronoun; a noun or an adjective follows the numeral.
_AFTER_PRONOUN = (
    "about|also|among|an|and|are|as|at|be|before|began|begins|beside|but|can|cannot|comes|could|"
    "did|do|does|ends|fails|for|from|gets|had|has|have|holds|if|in|into|is|it|keeps|may|might|"
    "must|needs|nor|not|on|only|or|otherwise|out|over|runs|shall|should|since|so|starts|takes|"
    "than|that|the|then|there|they|to|under|unless|until|was|were|when|where|whether|which|while|"
    "who|whom|whose|will|with|within|without|would|yet"
)

PATTERNS = {
    "those": re.compile(r"\bthose\b", re.IGNORECASE),
    "what-clauses": re.compile(r"\bwhat\b(?![^.?!]*\?)", re.IGNORECASE),
    "one as a pronoun": re.compile(
        rf"\bones\b|(?<!by )\bone(?= (?:{_AFTER_PRONOUN})\b|[.,;:)]|$)",
        re.IGNORECASE,
    ),
    "whose": re.compile(r"\bwhose\b", re.IGNORECASE),
}
_CODE = re.compile(r"`[^`]*`")
_WORD = re.compile(r"[A-Za-z][\w'-]*")
_DIRECTIVE = re.compile(r"#\s*(?:noqa|type:|fmt:|ruff:|mypy:|pragma)")


def prose_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and comments of a module, each with its line.

    Comments in adjacent lines are one text.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, " ".join(text.split())
    first, last, lines = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or _DIRECTIVE.match(token.string):
            continue
        if lines and token.start[0] != last + 1:
            yield first, " ".join(lines)
            lines = []
        first = first if lines else token.start[0]
        last = token.start[0]
        lines.append(token.string.lstrip("#: "))
    if lines:
        yield first, " ".join(lines)


def counted_words(texts: Iterable[str]) -> tuple[int, Counter[str]]:
    """Return the number of words, and how often each pattern occurs."""
    num_words, found = 0, Counter[str]()
    for text in texts:
        num_words += len(_WORD.findall(text))
        for name, pattern in PATTERNS.items():
            found[name] += len(pattern.findall(_CODE.sub("", text)))
    return num_words, found


def _files(places: Iterable[str]) -> list[Path]:
    paths = [ROOT / place for place in places]
    files = {file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])}
    return sorted(file for file in files if "_pb2" not in file.name)


def _print_places(files: Iterable[Path]) -> None:
    for file in files:
        for line, text in sorted(prose_of(file.read_text())):
            if names := list(+counted_words([text])[1]):
                print(f"{file.relative_to(ROOT)}:{line}: [{', '.join(names)}] {text}")


def main() -> int:
    """Print the figures, and return 1 if a figure is above the limit."""
    parser = argparse.ArgumentParser(description="Count backward-pointing words.")
    parser.add_argument("--list", nargs="+", metavar="PATH", help="print each place")
    arguments = parser.parse_args()
    if arguments.list:
        _print_places(_files(arguments.list))
        return 0
    by_file = {
        file: counted_words(text for _, text in prose_of(file.read_text()))
        for file in _files(PACKAGES)
    }
    num_words = sum(words for words, _ in by_file.values())
    found = sum((counter for _, counter in by_file.values()), Counter[str]())
    is_above = False
    for name in PATTERNS:
        rate = 1000 * found[name] / num_words
        is_above |= rate > LIMIT
        print(f"{name}: {rate:.2f} per 1 000 words ({found[name]} places), at most {LIMIT}")
    worst = sorted(by_file, key=lambda file: -by_file[file][1].total())[:5]
    for file in worst:
        print(f"  {by_file[file][1].total():3} in {file.relative_to(ROOT)}")
    if is_above:
        print("Repeat the noun; python -m scripts.words --list PATH shows the places.")
    return is_above


if __name__ == "__main__":
    sys.exit(main())
