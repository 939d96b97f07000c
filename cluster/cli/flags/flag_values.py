"""Converters of the values of flags, each of which rejects an invalid value in one line."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["count", "names", "number", "read_object", "read_value", "seconds"]

_WORDS: Mapping[str, object] = {"False": False, "None": None, "True": True}


def read_value(text: str) -> object:
    """Return the value of a word: JSON, True, False or None of Python, or else the word itself."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def read_object(text: str) -> dict[str, object]:
    """Return a JSON object."""
    value = read_value(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"must be a JSON object such as '{{\"key\": 1}}', not {text!r:.80}"
        )
    return value


def names(text: str) -> tuple[str, ...]:
    """Return the names in a list that is separated by commas, or in a JSON list as in vLLM."""
    listed = read_value(text)
    given = listed if isinstance(listed, list) else text.split(",")
    found = tuple(name.strip() if isinstance(name, str) else "" for name in given)
    if not all(found):
        raise argparse.ArgumentTypeError(f"must be names separated by commas, not {text!r}")
    return found


def count(low: int, high: int) -> Callable[[str], int]:
    """Return a converter of texts to integers in a range."""

    def convert(text: str) -> int:
        value = int(text) if text.isdecimal() and len(text) < 20 else -1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low} to {high}, not {text!r}")
        return value

    return convert


def number(low: float, high: float, unit: str = "") -> Callable[[str], float]:
    """Return a converter of texts to numbers in a range."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"must be from {low:g} to {high:g}{unit}, not {text!r}"
            )
        return value

    return convert


def seconds(low: float, high: float) -> Callable[[str], float]:
    """Return a converter of texts to seconds in a range."""
    return number(low, high, " seconds")
