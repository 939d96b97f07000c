"""Regular expressions as clients write them, read into expressions.

Read is what Python's `re` (with re.ASCII) and JavaScript understand alike: the whole text matches,
`.` is anything but the end of a line, classes like `\\d` are ASCII. What has no counterpart in a
grammar (look-around, back references, word borders, flags, anchors inside) is refused, not passed
over.
"""

from __future__ import annotations

from cluster.structured.grammar.compile_cost import MAX_COST, MAX_SKIPS, cost_of, skips_of
from cluster.structured.grammar.expressions import (
    MAX_SIZE,
    Characters,
    Choice,
    Expression,
    Ranges,
    Repeat,
    Sequence,
    Text,
    characters_but,
    refuse,
    size_of,
)

__all__ = ["read_regex"]

MAX_LENGTH = 4096
_MAX_DEPTH = 64
_MAX_COUNT = 1000

_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACES: Ranges = ((0x09, 0x0D), (0x20, 0x20))
# No character that any of the two languages calls a space is `\\S`.
_ALL_SPACES: Ranges = (
    *((0x09, 0x0D), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680)),
    *((0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F)),
    *((0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_CLASSES: dict[str, Ranges] = {
    "d": _DIGITS,
    "w": _WORD,
    "s": _SPACES,
    "D": characters_but(_DIGITS).ranges,
    "W": characters_but(_WORD).ranges,
    "S": characters_but(_ALL_SPACES).ranges,
}
# What is left out of a negated set is to be left out by both languages.
_NEGATED_CLASSES = {**_CLASSES, "s": _ALL_SPACES, "S": characters_but(_SPACES).ranges}
# In JavaScript these end a line as well.
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_ESCAPES = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B}
_HEX_LENGTHS = {"x": 2, "u": 4}


def read_regex(text: str) -> Expression:
    """Return the expression of a regular expression. Raises InvalidRequestError."""
    if len(text) > MAX_LENGTH:
        raise refuse(
            f"structure has a regular expression of {len(text)} characters; "
            f"at most {MAX_LENGTH} are allowed."
        )
    # Anchors at both ends are what is meant anyway.
    start = 1 if text.startswith("^") else 0
    end = len(text)
    if text.endswith("$") and (len(text) - len(text[:-1].rstrip("\\"))) % 2:
        end -= 1
    reader = _Reader(text, start, end)
    expression = reader.choice(depth=0)
    if not reader.is_at_end:
        raise reader.refusal("an unmatched )")
    if cost_of(expression) > MAX_COST:
        raise refuse(
            f"structure has a regular expression that counts {cost_of(expression)} characters of "
            f"most letters in all; at most {MAX_COST} are allowed."
        )
    if skips_of(expression) > MAX_SKIPS:
        raise refuse(
            f"structure has a regular expression with {skips_of(expression)} parts in a row that "
            f"may be left out; at most {MAX_SKIPS} are allowed."
        )
    return expression


class _Reader:
    """Reads from left to right."""

    def __init__(self, text: str, start: int, end: int) -> None:
        self._text = text
        self._at = start
        self._end = end

    @property
    def is_at_end(self) -> bool:
        """Whether all was read."""
        return self._at >= self._end

    def refusal(self, what: str) -> Exception:
        """Return the refusal of what is read at this moment."""
        return refuse(f"structure has a regular expression with {what} at character {self._at}.")

    def choice(self, depth: int) -> Expression:
        """Read alternatives, up to a closing parenthesis or the end."""
        if depth > _MAX_DEPTH:
            raise self.refusal(f"more than {_MAX_DEPTH} groups inside one another")
        parts = [self._sequence(depth)]
        while self._peek() == "|":
            self._at += 1
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _sequence(self, depth: int) -> Expression:
        parts: list[Expression] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom(depth)))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self, part: Expression) -> Expression:
        match self._peek():
            case "*":
                fewest, most = 0, None
            case "+":
                fewest, most = 1, None
            case "?":
                fewest, most = 0, 1
            case "{":
                fewest, most = self._count()
            case _:
                return part
        self._at += 1
        if self._peek() == "?":
            # What is taken first makes no difference to a text as a whole.
            self._at += 1
        if self._peek() in ("*", "+", "?", "{") and self._peek():
            raise self.refusal("a repetition of a repetition")
        if size_of(part) == 0:
            return part
        repeat = Repeat(part, fewest, most)
        for num, allowed, kind in (
            (size_of(repeat), MAX_SIZE, "characters"),
            (cost_of(repeat), MAX_COST, "characters of most letters"),
        ):
            if num > allowed:
                raise self.refusal(f"a repetition of {num} {kind}, where {allowed} are allowed,")
        return repeat

    def _count(self) -> tuple[int, int | None]:
        end = self._text.find("}", self._at, self._end)
        numbers = self._text[self._at + 1 : end].split(",") if end >= 0 else []
        if not 1 <= len(numbers) <= 2 or not all(n.isascii() and len(n) < 8 for n in numbers):
            raise self.refusal("a { that begins no repetition")
        if not numbers[0].isdigit() or not (numbers[-1].isdigit() or numbers[1:] == [""]):
            raise self.refusal("a { that begins no repetition")
        fewest = int(numbers[0])
        most = int(numbers[-1]) if numbers[-1] else None
        if max(fewest, most or 0) > _MAX_COUNT:
            raise self.refusal(f"a repetition of more than {_MAX_COUNT}")
        if most is not None and most < fewest:
            raise self.refusal("a repetition whose maximum is below its minimum")
        self._at = end
        return fewest, most

    def _atom(self, depth: int) -> Expression:
        character = self._take()
        match character:
            case "(":
                return self._group(depth)
            case "[":
                return self._set()
            case ".":
                return characters_but(_LINE_ENDS)
            case "\\":
                found = self._escape(_CLASSES)
                return Text(chr(found)) if isinstance(found, int) else Characters(found)
            case "^" | "$":
                raise self.refusal(f"{character} elsewhere than at its ends, before")
            case "*" | "+" | "?" | "{":
                raise self.refusal(f"a {character} that repeats nothing, before")
        _check_character(ord(character))
        return Text(character)

    def _group(self, depth: int) -> Expression:
        if self._peek() == "?":
            if self._text[self._at : self._at + 2] != "?:":
                raise self.refusal("a group of a kind that is not supported, only ( and (?: are,")
            self._at += 2
        inside = self.choice(depth + 1)
        if self._take() != ")":
            raise self.refusal("a ( that is not closed")
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
                    raise self.refusal("a range that is none")
                ranges.append((low, high))
            else:
                ranges.append((low, low))
        self._at += 1
        if not ranges:
            raise self.refusal("an empty set")
        if is_negated:
            return characters_but(tuple(ranges))
        return characters_but(characters_but(tuple(ranges)).ranges)

    def _member(self, classes: dict[str, Ranges]) -> int | Ranges:
        character = self._take()
        if not character:
            raise self.refusal("a [ that is not closed")
        if character == "\\":
            if self._peek() == "b":
                self._at += 1
                return 0x08
            return self._escape(classes)
        if character == "[":
            raise self.refusal("a [ inside a set, which must be written \\[,")
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
            if len(digits) != _HEX_LENGTHS[character] or not _is_hex(digits):
                raise self.refusal(f"an incomplete \\{character}")
            return _check_character(int(digits, 16))
        if not character or character.isalnum() or character == "_":
            raise self.refusal(f"the escape \\{character}, which is not supported, before")
        return _check_character(ord(character))

    def _peek(self) -> str:
        return self._text[self._at] if self._at < self._end else ""

    def _take(self) -> str:
        character = self._peek()
        self._at += 1
        return character


def _is_hex(digits: str) -> bool:
    return all(digit in "0123456789abcdefABCDEF" for digit in digits)


def _check_character(code_point: int) -> int:
    if code_point == 0 or 0xD800 <= code_point <= 0xDFFF:
        raise refuse(
            f"structure has a regular expression with U+{code_point:04X}, which no text has."
        )
    return code_point
