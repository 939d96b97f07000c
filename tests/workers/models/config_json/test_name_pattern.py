"""Patterns of layers' names: those that checkpoints have are read, and slow ones rejected."""

from __future__ import annotations

import re
import time

import pytest

from workers.models.config_json.quantization import PatternError, name_pattern

NAME = "model.layers.12.self_attn.q_proj"


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
