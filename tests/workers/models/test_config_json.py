"""config.json: files, patterns of names and ALiBi."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from pagedray.errors import CheckpointError
from tests.workers.reference import save_checkpoint
from workers.models.config_json.config_file import ConfigFile
from workers.models.config_json.quantization import PatternError, name_pattern
from workers.models.families.alibi import alibi_slopes
from workers.models.families.registry import read_model_config
from workers.models.self_attention import attention_params
from workers.parallel.group import SoloGroup

NUMS_OF_HEADS = [1, 2, 3, 5, 6, 8, 12, 14, 16, 20, 31, 40, 112]
MAX_BYTES = 4 * 2**20
NAME = "model.layers.12.self_attn.q_proj"


@pytest.mark.parametrize("num_heads", NUMS_OF_HEADS)
def test_slopes_are_those_of_bloom(num_heads: int) -> None:
    bias = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)
    torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads)), bias[:, 0, 1])


@pytest.mark.parametrize("bias_max", [4, 8, 16])
@pytest.mark.parametrize("num_heads", NUMS_OF_HEADS)
def test_slopes_are_those_of_mpt(num_heads: int, bias_max: int) -> None:
    bias = build_mpt_alibi_tensor(num_heads, 2, bias_max)
    torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads, bias_max)), -bias[:, 0, 0])


def test_ranks_have_the_slopes_of_their_own_heads(tmp_path: Path) -> None:
    save_checkpoint("bloom-6-heads", tmp_path)
    config = read_model_config(tmp_path)
    parts = []
    for rank in range(2):
        group = SoloGroup()
        group.rank, group.size = rank, 2
        parts.append(attention_params(config, 0, group).alibi_slopes)
    assert parts == [alibi_slopes(6)[:3], alibi_slopes(6)[3:]]


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


@pytest.mark.parametrize(
    "text",
    [
        *(r".*lm_head", r".*\.mlp\.gate$", r"model\.layers\.\d+\.self_attn\.(q|k|v|o)_proj$"),
        *(r"^model\.layers\.[0-3]\..*", r".*layers\.(\d+)\.self_attn\..*", r"^(?!.*mtp).*$"),
        *(r".*\.layers\.\d+\.mlp\.experts\.\d+\..*_proj.*", r".*layers\.[0-9]+\..*q.*p.*"),
        *(r"(?:.*\.)?[qkv]_proj", r"visual.*", r".*[*+?{]+", r"\(a\)\*", r"a{2,3}b{1}", r"[]*]+"),
    ],
)
def test_patterns_of_checkpoints_match_as_in_python(text: str) -> None:
    found, expected = name_pattern(text), re.compile(text)
    for name in (NAME, "lm_head", "visual.blocks.0", "model.layers.12.mlp.gate", "(a)*", "aab"):
        assert bool(found.match(name)) == bool(expected.match(name))


@pytest.mark.parametrize(
    "text",
    [
        *("(a+)+$", "([a-z_.0-9]*)*!", "(a|a)*b", "(?:(?:.*))+x", "(a?){60}a{60}", "((.|_)+)x{2}"),
        *(".*.*.*.*.*x", "a?" * 30, "(?P<x>a)", "(?(1)a|b)", "(?i)a", "(", "a{99999999999}"),
        *("*", "x" * 501, "[^.]+" * 5, r"\d*" * 17),
    ],
)
def test_what_may_take_long_is_rejected(text: str) -> None:
    with pytest.raises(PatternError) as caught:
        name_pattern(text)
    assert "\n" not in str(caught.value)


def test_the_costliest_pattern_takes_milliseconds() -> None:
    pattern = name_pattern(".*.*.*.*!")
    began_s = time.process_time()
    assert pattern.match(NAME) is None
    # Exponential time would be hours.
    assert time.process_time() - began_s < 1.0
