"""Values of a checkpoint's JSON files: what is returned, and what is rejected by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedray.errors import CheckpointError
from workers.models.config_json.config_file import ConfigFile

MAX_BYTES = 4 * 2**20


def read(folder: Path, text: str) -> ConfigFile:
    path = folder / "config.json"
    path.write_text(text)
    return ConfigFile.read(path)


def integer(file: ConfigFile) -> int:
    return file.integer("key", least=2, most=5)


def number(file: ConfigFile) -> float:
    return file.number("key", least=2.0, most=5.0)


def numbers(file: ConfigFile) -> tuple[float, ...]:
    return file.numbers("key", 2, most=5.0)


def choice(file: ConfigFile) -> str:
    return file.choice("key", ("a", "b"))


def flag(file: ConfigFile) -> bool:
    return file.flag("key", False)


def token_ids(file: ConfigFile) -> tuple[int, ...]:
    return file.token_ids("key")


def indices(file: ConfigFile) -> tuple[int, ...]:
    return file.indices("key", most=5)


def word(file: ConfigFile) -> str:
    return file.word("key")


def words(file: ConfigFile) -> tuple[str, ...]:
    return file.words("key")


def section(file: ConfigFile) -> tuple[str, ...]:
    return file.section("key").given_keys()


@pytest.mark.parametrize(
    ("method", "text", "value"),
    [
        *((integer, text, int(text)) for text in ("2", "5")),
        *((number, text, float(text)) for text in ("2.001", "3", "5", "5.0")),
        (numbers, "[1, 5]", (1.0, 5.0)),
        *((choice, f'"{one}"', one) for one in "ab"),
        *((flag, text, text == "true") for text in ("true", "false")),
        (flag, "null", False),
        *((token_ids, text, ids) for text, ids in (("null", ()), ("0", (0,)), ("[0, 7]", (0, 7)))),
        *((indices, text, found) for text, found in (("null", ()), ("[0, 5]", (0, 5)))),
        (word, '""', ""),
        *((words, text, found) for text, found in (("null", ()), ('["a", ""]', ("a", "")))),
        *((section, text, found) for text, found in (("null", ()), ('{"a": 1}', ("a",)))),
    ],
)
def test_values_are_read(
    method: Callable[[ConfigFile], object], text: str, value: object, tmp_path: Path
) -> None:
    assert method(read(tmp_path, f'{{"key": {text}}}')) == value


@pytest.mark.parametrize(
    ("method", "texts"),
    [
        (integer, ("null", "1", "6", "3.0", "true", '"3"', "[3]", "NaN")),
        (number, ("null", "2", "5.001", "true", '"3"', "[3]", "NaN", "Infinity", "-Infinity")),
        (numbers, ("null", "[1]", "[1, 2, 3]", "[0, 1]", "[1, true]", '"12"', "1", '{"0": 1}')),
        (choice, ("null", '"c"', '""', "1", '["a"]', '{"a": 1}')),
        (flag, ("0", "1", '"true"', "[]")),
        (token_ids, ("-1", "true", "1.0", '"1"', "[1, -1]", "[true]", "[[1]]", "{}")),
        (indices, ("3", "[-1]", "[6]", "[true]", "[1.0]", '["1"]', "{}")),
        (word, ("null", "1", '["a"]')),
        (words, ('"a"', "[1]", '["a", null]', '{"a": "b"}')),
        (section, ("1", '"a"', "[]", "[1]", "true")),
    ],
)
def test_what_is_rejected_is_named(
    method: Callable[[ConfigFile], object], texts: tuple[str, ...], tmp_path: Path
) -> None:
    for text in texts:
        file = read(tmp_path, f'{{"key": {text}}}')
        with pytest.raises(CheckpointError) as caught:
            method(file)
        assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: key"), text


def test_long_values_are_shortened(tmp_path: Path) -> None:
    for value, shown in (("x" * 58, "x" * 58 + '"'), ("x" * 59, "x" * 56 + "...")):
        with pytest.raises(CheckpointError) as caught:
            flag(read(tmp_path, json.dumps({"key": value})))
        assert str(caught.value) == (
            f'{tmp_path / "config.json"}: key must be true or false, not "{shown}.'
        )


@pytest.mark.parametrize(
    ("value", "shown"), [(10**40 - 1, "9" * 40), (10**40, "an integer of 133 bits")]
)
def test_long_integers_are_described(value: int, shown: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"not {shown}"):
        flag(read(tmp_path, json.dumps({"key": value})))


@pytest.mark.parametrize(
    ("key", "shown"),
    [("k" * 100, "k" * 100), ("k" * 101, "'" + "k" * 99), ("a\nb", r"'a\nb'")],
)
def test_keys_of_any_text_are_shown_in_one_line(key: str, shown: str, tmp_path: Path) -> None:
    error = read(tmp_path, "{}").rejection(key, "is odd")
    assert str(error) == f"{tmp_path / 'config.json'}: {shown} is odd."


@pytest.mark.parametrize("text", ["[1]", "1", "null", '"a"', "[", "[" * 100_000, "\udcff"])
def test_a_file_must_be_an_object(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError) as caught:
        ConfigFile.read(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_list_of_objects_is_read(tmp_path: Path) -> None:
    path = tmp_path / "modules.json"
    path.write_text('[{"a": 1}, {}]')
    assert [one.given_keys() for one in ConfigFile.read_list(path)] == [("a",), ()]
    for text in ('{"a": {}}', "[1]", "[{}, null]", "3"):
        path.write_text(text)
        with pytest.raises(CheckpointError, match="must contain a list of JSON objects"):
            ConfigFile.read_list(path)


def test_a_file_of_four_mib_is_read_and_no_larger_one(tmp_path: Path) -> None:
    text = '{"key": 3}'.ljust(MAX_BYTES)
    assert integer(read(tmp_path, text)) == 3
    with pytest.raises(CheckpointError, match=f"has {MAX_BYTES + 1} bytes; at most {MAX_BYTES}"):
        read(tmp_path, text + " ")


def test_keys_that_no_method_read_are_found(tmp_path: Path) -> None:
    file = read(tmp_path, '{"a": 1, "b": {"c": 1, "d": 1}, "e": {"f": 1}}')
    assert "a" in file
    assert file.section("b").value("c") == 1
    found = [(key, holder.rejection(key, "x")) for holder, key in file.unread()]
    assert [key for key, _ in found] == ["e", "d"]
    assert str(found[1][1]) == f"{tmp_path / 'config.json'}: b.d x."
