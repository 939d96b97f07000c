"""Parses the regular expressions of clients.

Supported is the common subset of Python's `re` (with re.ASCII) and JavaScript: the whole text must
match, `.` excludes line terminators, classes like `\\d` and `(?i:...)` are ASCII. Features without
a counterpart in a grammar (lookaround, backreferences, word boundaries, other flags, inner anchors)
are rejected.
"""

import re
import string

from cluster.structured.grammar.expressions import (
    MAX_COST,
    MAX_OPTIONAL_RUN,
    MAX_SIZE,
    Alternation,
    Characters,
    Concat,
    Expression,
    Ranges,
    Repeat,
    Text,
    complement,
    cost_of,
    invalid_structure,
    optional_run_of,
    size_of,
)

__all__ = ["ends_with_anchor", "read_regex"]

MAX_LENGTH = 4096
_MAX_DEPTH = 64
_MAX_COUNT = 1000

_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACES: Ranges = ((0x09, 0x0D), (0x20, 0x20))
# `\\S` excludes the spaces of both languages.
_ALL_SPACES: Ranges = (
    *((0x09, 0x0D), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680)),
    *((0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F)),
    *((0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_CLASSES: dict[str, Ranges] = {
    "d": _DIGITS,
    "w": _WORD,
    "s": _SPACES,
    "D": complement(_DIGITS).ranges,
    "W": complement(_WORD).ranges,
    "S": complement(_ALL_SPACES).ranges,
}
# A negated set excludes everything that it excludes in either language.
_NEGATED_CLASSES = {**_CLASSES, "s": _ALL_SPACES, "S": complement(_SPACES).ranges}
# The line terminators of both languages.
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_ESCAPES = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B}
_HEX_LENGTHS = {"x": 2, "u": 4}
_REPEAT_COUNT = re.compile(r"\{([0-9]+)(?:,([0-9]*))?\}")


def read_regex(text: str) -> Expression:
    """Return a parsed regular expression. Raises InvalidRequestError."""
    if len(text) > MAX_LENGTH:
        raise _unsupported(f"{len(text)} characters, more than the maximum of {MAX_LENGTH}")
    # The whole text must match, so anchors at the ends are redundant.
    start = 1 if text.startswith("^") else 0
    end = len(text) - ends_with_anchor(text)
    parser = _RegexParser(text, start, end, is_anchored=start > 0 and end < len(text))
    expression = parser.parse_alternatives(depth=0)
    if not parser.is_at_end:
        raise parser.error("unbalanced parenthesis")
    if (cost := cost_of(expression)) > MAX_COST:
        raise _unsupported(f"{cost} wide characters, more than the maximum of {MAX_COST}")
    if (length := optional_run_of(expression)) > MAX_OPTIONAL_RUN:
        raise _unsupported(
            f"{length} optional parts in a row, more than the maximum of {MAX_OPTIONAL_RUN}"
        )
    return expression


def ends_with_anchor(text: str) -> bool:
    """Return whether a regular expression ends with `$` that is not escaped."""
    return text.endswith("$") and (len(text) - len(text[:-1].rstrip("\\"))) % 2 == 1


class _RegexParser:
    """Parses recursively, from left to right."""

    def __init__(self, text: str, start: int, end: int, *, is_anchored: bool) -> None:
        self._text = text
        self._at = start
        self._end = end
        self._is_anchored = is_anchored
        self._ignores_case = False

    @property
    def is_at_end(self) -> bool:
        """Whether the whole text was parsed."""
        return self._at >= self._end

    def error(self, problem: str) -> Exception:
        """Return the error for a problem at the current position."""
        return _unsupported(f"{problem} at position {self._at}")

    def parse_alternatives(self, depth: int) -> Expression:
        """Parse alternatives, up to a closing parenthesis or the end."""
        if depth > _MAX_DEPTH:
            raise self.error(f"more than {_MAX_DEPTH} nested groups")
        parts = [self._sequence(depth)]
        while self._peek() == "|":
            self._at += 1
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else Alternation(tuple(parts))

    def _sequence(self, depth: int) -> Expression:
        parts: list[Expression] = []
        # If the whole expression is anchored, anchors of its alternatives are redundant.
        may_have_anchors = self._is_anchored and depth == 0
        self._at += may_have_anchors and self._peek() == "^"
        while self._peek() not in ("", "|", ")"):
            if may_have_anchors and self._text[self._at : self._at + 2] == "$|":
                self._at += 1
                break
            parts.append(self._repeated(self._atom(depth)))
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def _repeated(self, part: Expression) -> Expression:
        match self._peek():
            case "*":
                minimum, maximum = 0, None
            case "+":
                minimum, maximum = 1, None
            case "?":
                minimum, maximum = 0, 1
            case "{":
                minimum, maximum = self._count()
            case _:
                return part
        self._at += 1
        if self._peek() == "?":
            # Lazy or greedy, the same texts match.
            self._at += 1
        if self._peek() in ("*", "+", "?", "{"):
            raise self.error("multiple repeat")
        size = size_of(part) * max(1, minimum + 1 if maximum is None else maximum)
        if size == 0:
            return part
        repeat = Repeat(part, minimum, maximum)
        if size > MAX_SIZE:
            raise self.error(_too_long(size, "characters", MAX_SIZE))
        # The cost is at most the size.
        if size > MAX_COST and (cost := cost_of(repeat)) > MAX_COST:
            raise self.error(_too_long(cost, "wide characters", MAX_COST))
        return repeat

    def _count(self) -> tuple[int, int | None]:
        found = _REPEAT_COUNT.match(self._text, self._at, self._end)
        if found is None:
            raise self.error("{ without a repeat count")
        minimum = int(found[1])
        maximum = minimum if found[2] is None else int(found[2]) if found[2] else None
        if max(minimum, maximum or 0) > _MAX_COUNT:
            raise self.error(f"repeat count above the maximum of {_MAX_COUNT}")
        if maximum is not None and maximum < minimum:
            raise self.error("min repeat greater than max repeat")
        self._at = found.end() - 1
        return minimum, maximum

    def _atom(self, depth: int) -> Expression:
        character = self._take()
        match character:
            case "(":
                return self._group(depth)
            case "[":
                return self._set()
            case ".":
                return complement(_LINE_ENDS)
            case "\\":
                found = self._escape(_CLASSES)
                return self._letter(chr(found)) if isinstance(found, int) else Characters(found)
            case "^" | "$":
                raise self.error(f"anchor {character} inside the expression")
            case "*" | "+" | "?" | "{":
                raise self.error("nothing to repeat")
        _check_character(ord(character))
        return self._letter(character)

    def _letter(self, letter: str) -> Expression:
        if not (self._ignores_case and letter.isascii() and letter.isalpha()):
            return Text(letter)
        return Characters(tuple((ord(one), ord(one)) for one in (letter.upper(), letter.lower())))

    def _group(self, depth: int) -> Expression:
        ignored_case = self._ignores_case
        if self._peek() == "?":
            start = "?i:" if self._text.startswith("?i:", self._at) else "?:"
            if not self._text.startswith(start, self._at):
                raise self.error("group other than (...) and (?:...)")
            self._ignores_case = ignored_case or start == "?i:"
            self._at += len(start)
        inside = self.parse_alternatives(depth + 1)
        self._ignores_case = ignored_case
        if self._take() != ")":
            raise self.error("missing ), unterminated group")
        return inside

    def _set(self) -> Expression:
        is_negated = self._peek() == "^"
        self._at += is_negated
        classes = _NEGATED_CLASSES if is_negated else _CLASSES
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            low = self._member(classes)
            if isinstance(low, tuple):
                ranges += low
            elif self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._member(classes)
                if isinstance(high, tuple) or high < low:
                    raise self.error("bad character range")
                ranges.append((low, high))
            else:
                ranges.append((low, low))
        self._at += 1
        if not ranges:
            raise self.error("empty character set")
        if self._ignores_case:
            ranges += [
                (ord(chr(code).swapcase()),) * 2
                for low, high in tuple(ranges)
                for code in (*range(0x41, 0x5B), *range(0x61, 0x7B))
                if low <= code <= high
            ]
        others = complement(tuple(ranges))
        return others if is_negated else complement(others.ranges)

    def _member(self, classes: dict[str, Ranges]) -> int | Ranges:
        character = self._take()
        if not character:
            raise self.error("unterminated character set")
        if character == "\\":
            if self._peek() == "b":
                self._at += 1
                return 0x08
            return self._escape(classes)
        if character == "[":
            raise self.error("[ in a character set, which must be escaped as \\[,")
        return ord(character)

    def _escape(self, classes: dict[str, Ranges]) -> int | Ranges:
        character = self._take()
        if character in classes:
            return classes[character]
        if character in _ESCAPES:
            return _ESCAPES[character]
        if character in _HEX_LENGTHS:
            digits = self._text[self._at : min(self._at + _HEX_LENGTHS[character], self._end)]
            self._at += len(digits)
            if len(digits) != _HEX_LENGTHS[character] or not set(digits) <= set(string.hexdigits):
                raise self.error(f"incomplete escape \\{character}")
            return _check_character(int(digits, 16))
        if not character or character.isalnum() or character == "_":
            raise self.error(f"unsupported escape \\{character}")
        return _check_character(ord(character))

    def _peek(self) -> str:
        return self._text[self._at] if self._at < self._end else ""

    def _take(self) -> str:
        character = self._peek()
        self._at += 1
        return character


def _too_long(num: int, kind: str, most: int) -> str:
    return f"repetition expands to {num} {kind}, more than the maximum of {most},"


def _unsupported(problem: str) -> Exception:
    return invalid_structure(f"structure has an unsupported regular expression: {problem}.")


def _check_character(code_point: int) -> int:
    if code_point == 0 or 0xD800 <= code_point <= 0xDFFF:
        raise _unsupported(f"character U+{code_point:04X}")
    return code_point
