"""Options of Python programs with values that they do not take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.engine.engine_options import EngineOptions
from cluster.engine.vllm_options import engine_options
from cluster.llm.llm import LLM
from pagedray.errors import StartupError
from tests.system.server_process import TINY_LLAMA


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("dtype", "float8", "'float8' of option dtype: allowed are float32, bfloat16, float16."),
        ("preemption", "never", "'never' of option preemption: allowed are auto, swap, recompute."),
        ("executor", "process", "'process' of option executor: allowed are ray, local."),
        ("load_format", "pt", "'pt' of option load_format: allowed are auto, dummy."),
        ("num_threads", 1.5, "1.5 of option num_threads: Expected `int | null`, got `float`."),
        ("block_size", "16", "'16' of option block_size: Expected `int`, got `str`."),
        ("enforce_eager", "no", "'no' of option enforce_eager: Expected `bool`, got `str`."),
        ("max_num_seqs", [1], "a list of option max_num_seqs: Expected `int | null`, got `array`."),
    ],
)
def test_values_are_rejected_in_one_line(
    name: str,
    value: Any,  # Any: of a wrong type
    text: str,
) -> None:
    with pytest.raises(StartupError) as caught:
        LLM(TINY_LLAMA, **{name: value})
    assert str(caught.value) == f"Invalid value {text}"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_threads": 0}, "num_threads must be from 1 to 4096, not 0."),
        ({"num_threads": 10**12}, f"num_threads must be from 1 to 4096, not {10**12}."),
        # More bytes than there are addresses.
        ({"max_num_seqs": 10**12, "num_blocks": 8, "num_cpu_blocks": 0},
         f"Could not allocate the tokens and sampling states of {10**12} sequences of up to 1024 "
         "tokens; use a lower --max-num-seqs or --max-model-len."),
    ],
)  # fmt: skip
def test_numbers_that_no_machine_has_room_for(
    options: dict[str, Any],  # Any: of any type
    text: str,
) -> None:
    with pytest.raises(StartupError) as caught:
        LLM(TINY_LLAMA, executor="local", device="cpu", load_format="dummy", **options)
    assert str(caught.value) == text


def test_none_is_the_default_and_a_path_is_text() -> None:
    folder = Path("/cache")
    found = engine_options(
        {"block_size": None, "memory_fraction": 1, "disk_cache_folder": folder, "dtype": "auto"}
    )
    assert found == EngineOptions(memory_fraction=1.0, disk_cache_folder="/cache")
