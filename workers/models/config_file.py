"""A checkpoint's JSON file, read with suspicion: a wrong value ends in one line that names it."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from pagedray.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["MISSING", "ConfigFile"]

_MAX_BYTES = 4 * 2**20


class _Missing:
    """What no default looks like."""


MISSING = _Missing()


class ConfigFile:
    """The values of one JSON object, and the file they came from."""

    def __init__(self, path: Path, values: Mapping[str, object], *, prefix: str = "") -> None:
        self._path = path
        self._values = values
        self._prefix = prefix

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Return the object in a file."""
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise CheckpointError(
                    f"{path} has {path.stat().st_size} bytes; at most {_MAX_BYTES} are allowed."
                )
            values = json.loads(path.read_bytes())
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
        except (ValueError, RecursionError) as error:
            first_line = str(error).partition("\n")[0]
            raise CheckpointError(f"{path} is not valid JSON: {first_line}.") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} must hold a JSON object, not {_shown(values)}.")
        return cls(path, values)

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    @property
    def path(self) -> Path:
        """Return where the values came from."""
        return self._path

    def refusal(self, key: str, problem: str) -> CheckpointError:
        """Return the error that names the file, the key and what is wrong with it."""
        return CheckpointError(f"{self._path}: {self._prefix}{key} {problem}.")

    def given_keys(self) -> tuple[str, ...]:
        """Return the keys that are there."""
        return tuple(self._values)

    def value(self, key: str) -> object:
        """Return a value as it is; None if there is none."""
        return self._values.get(key)

    def has_null(self, key: str) -> bool:
        """Whether the key is there and says that there is no value."""
        return key in self._values and self._values[key] is None

    def first_of(self, *keys: str) -> str:
        """Return the first key that has a value, or else the last key."""
        return next((key for key in keys if key in self), keys[-1])

    def integer(
        self, key: str, default: int | _Missing | None = MISSING, *, least: int = 1, most: int
    ) -> int:
        """Return an integer within bounds; a default of None stands for a missing key."""
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refusal(
                key, f"must be an integer from {least} to {most}, not {_shown(value)}"
            )
        return value

    def number(
        self,
        key: str,
        default: float | _Missing = MISSING,
        *,
        least: float = 0.0,
        most: float = math.inf,
    ) -> float:
        """Return a finite number that is more than `least` and at most `most`."""
        value = self._given(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not (least < value <= most and math.isfinite(value))
        ):
            raise self.refusal(
                key,
                f"must be a number of more than {least:g}, at most {most:g}, not {_shown(value)}",
            )
        return float(value)

    def number_or_null(self, key: str, default: float | None, *, most: float) -> float | None:
        """Return a number of more than 0, or None for a null; the default is for a missing key."""
        if self.has_null(key) or (default is None and key not in self):
            return None
        return self.number(key, MISSING if default is None else default, most=most)

    def numbers(self, key: str, length: int, *, most: float) -> tuple[float, ...]:
        """Return a list of so many numbers, each of more than 0."""
        values = self._given(key, MISSING)
        if not isinstance(values, list) or len(values) != length:
            raise self.refusal(key, f"must be a list of {length} numbers, not {_shown(values)}")
        items = ConfigFile(
            self._path,
            {str(index): value for index, value in enumerate(values)},
            prefix=f"{self._prefix}{key}.",
        )
        return tuple(items.number(str(index), most=most) for index in range(length))

    def refuse_unless(self, key: str, allowed: object) -> None:
        """Refuse any value but the one that is supported."""
        value = self._given(key, allowed)
        if value != allowed:
            raise self.refusal(key, f"must be {_shown(allowed)}, not {_shown(value)}")

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._given(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, f"must be true or false, not {_shown(value)}")
        return value

    def choice(self, key: str, allowed: Iterable[str], default: str | _Missing = MISSING) -> str:
        """Return one of the allowed words."""
        value = self._given(key, default)
        words = list(allowed)
        if not isinstance(value, str) or value not in words:
            raise self.refusal(key, f"must be one of {', '.join(words)}, not {_shown(value)}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return the ids of a key that holds one, a list of them, or nothing."""
        value = self._values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise self.refusal(key, f"must hold token ids of 0 or more, not {_shown(token_id)}")
        return tuple(ids)

    def words(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; empty if there is none."""
        value = self._values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.refusal(key, f"must be a list of strings, not {_shown(value)}")
        return tuple(value)

    def section(self, key: str) -> ConfigFile:
        """Return the object under a key; empty if there is none."""
        value = self._values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.refusal(key, f"must be an object, not {_shown(value)}")
        return ConfigFile(self._path, value, prefix=f"{self._prefix}{key}.")

    def _given(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is MISSING:
            raise self.refusal(key, "is missing")
        return default


def _shown(value: object) -> str:
    # Integers of thousands of digits cannot even be printed.
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return f"a number of {value.bit_length()} bits"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
