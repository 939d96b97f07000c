"""The arguments of a Serve application, from Python, YAML and the command line."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from cluster.engine.engine_options import EngineOptions
from cluster.serving.ray_serve.options import ServeOptions, read_arguments
from pagedray.errors import StartupError


def test_numbers_may_be_strings() -> None:
    given = {"model": "m", "num_replicas": "2", "num_blocks": "64", "enable_prefix_cache": "false"}
    arguments = read_arguments(given)
    assert arguments.model == "m"
    assert arguments.serve == ServeOptions(num_replicas=2)
    assert arguments.engine == EngineOptions(num_blocks=64, enable_prefix_cache=False)


def test_engine_options_may_have_the_names_of_vllm() -> None:
    given = {
        "model": "m",
        "gpu_memory_utilization": "0.5",
        "max_model_len": "32K",
        "enable_prefix_caching": False,
        "dtype": "auto",
        "disable_log_stats": True,
    }
    assert read_arguments(given).engine == EngineOptions(
        memory_fraction=0.5, max_model_len=32768, enable_prefix_cache=False
    )


def test_absent_arguments_are_the_defaults() -> None:
    arguments = read_arguments({"model": "m", "max_model_len": None})
    assert (arguments.engine, arguments.serve) == (EngineOptions(), ServeOptions())


def test_option_names_are_unique() -> None:
    names = [field.name for kind in (EngineOptions, ServeOptions) for field in fields(kind)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"model": None},
            "model is required: a Hub id, or the path of a checkpoint folder on every node.",
        ),
        ({"num_block": 1}, "Unknown argument 'num_block'; did you mean num_blocks?"),
        ({"num_replica": 1}, "Unknown argument 'num_replica'; did you mean num_replicas?"),
        (
            {"no_prefix_cache": True},
            "Unknown argument 'no_prefix_cache'; did you mean enable_prefix_cache = false?",
        ),
        ({"frobnicate": 1}, "Unknown argument 'frobnicate'; known arguments are model, "),
        ({"enable_lora": True}, "enable_lora is not supported: merge the adapter"),
        (
            {"gpu_memory_utilization": "0.5", "memory_fraction": "0.5"},
            "memory_fraction and another name of memory_fraction cannot be used together.",
        ),
        (
            {"num_blocks": "many"},
            "Invalid value 'many' of argument num_blocks: Expected `int | null`, got `str`.",
        ),
        ({"num_blocks": True}, "Invalid value True of argument num_blocks: "),
        ({"device": "tpu"}, "Invalid value 'tpu' of argument device: allowed are cuda, cpu."),
        ({"num_replicas": 0}, "num_replicas must be at least 1, not 0."),
        ({"num_replicas": 3, "max_replicas": 2}, "max_replicas must be at least 3, not 2."),
        ({"target_kv_use": 0}, "target_kv_use must be greater than 0 and at most 1, not 0.0."),
        ({"drain_timeout_s": -1}, "drain_timeout_s must be at least 0, not -1.0."),
        ({"stall_timeout_s": float("nan")}, "stall_timeout_s must be at least 1, not nan."),
        ({"placement_strategy": "WIDE"}, "Invalid value 'WIDE' of argument placement_strategy: "),
        ({"lease_s": 4.9}, "lease_s must be at least 5, not 4.9."),
        ({"log_format": "xml"}, "Invalid value 'xml' of argument log_format: "),
        ({"tool_call_format": "xml"}, "Invalid value 'xml' of argument tool_call_format: "),
        ({"log_level": "loud"}, "Invalid value 'loud' of argument log_level: "),
    ],
)
def test_invalid_options_are_named_in_one_line(
    given: dict[str, Any], text: str
) -> None:  # Any: all
    with pytest.raises(StartupError) as caught:
        read_arguments({"model": "m"} | given)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


def test_a_model_may_have_several_names() -> None:
    names = ["tiny", "other"]
    serve = read_arguments({"model": "m", "served_model_name": names}).serve
    assert serve.served_names == ("tiny", "other")
    assert read_arguments({"model": "m", "served_model_name": "a"}).serve.served_names == ("a",)
    assert read_arguments({"model": "m"}).serve.served_names == ()
