"""Options that name a model, its revision and tokenizer, and that replace fields of its files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cluster.engine.engine_options import (
    EngineOptions,
    engine_config,
    full_name,
    sampling_defaults,
    speculation_config,
)
from cluster.engine.vllm_options import engine_options, own_options
from cluster.llm.llm import LLM
from pagedray.config import SpeculationConfig
from pagedray.errors import StartupError
from tests.system.server_process import TINY_LLAMA
from workers.models.families.registry import read_model_config

if TYPE_CHECKING:
    from collections.abc import Mapping

COMMIT = "a" * 40
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LINEAR = {"rope_type": "linear", "factor": 2.0}
OPTIONS = EngineOptions(device="cpu", executor="local")
TEXT = json.loads((TINY_LLAMA / "config.json").read_text())
# As transformers 4 wrote it.
OLD_TEXT = {name: value for name, value in TEXT.items() if name != "rope_parameters"} | {
    "rope_theta": 5e4
}
GIVEN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "eos_token_id": 1}


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        ("org/name", {}, "org/name"),
        ("org/name", {"revision": "main"}, "org/name@main"),
        ("org/name", {"revision": COMMIT}, f"org/name@{COMMIT}"),
        ("org/name@v1", {"revision": "v1"}, "org/name@v1"),
        ("org/name", {"tokenizer": "org/name"}, "org/name"),
        ("org/name", {"tokenizer": "org/name@v1", "revision": "v1"}, "org/name@v1"),
        ("org/name", {"tokenizer_revision": "main"}, "org/name"),
        ("org/name", {"tokenizer_revision": "v1", "revision": "v1"}, "org/name@v1"),
        ("org/name@v1", {"tokenizer_revision": "v1"}, "org/name@v1"),
        (str(TINY_LLAMA), {"revision": "main", "tokenizer": str(TINY_LLAMA)}, str(TINY_LLAMA)),
        (TINY_LLAMA, {"tokenizer": f"{TINY_LLAMA}/"}, TINY_LLAMA),
        ("/on/other/nodes", {"revision": "main"}, "/on/other/nodes"),
    ],
)
def test_the_name_of_a_model_has_its_revision(
    model: str | Path, options: dict[str, Any], expected: str | Path
) -> None:
    assert full_name(model, EngineOptions(**options)) == expected


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"revision": "v2"}, "org/name@v1 names another revision than revision v2; use one."),
        ({"tokenizer": "org/other"}, "tokenizer org/other is not supported: the tokenizer is read"),
        ({"tokenizer_revision": "v2"}, "tokenizer_revision v2 is not supported: the tokenizer is"),
    ],
)
def test_another_name_is_rejected(options: dict[str, Any], text: str) -> None:
    with pytest.raises(StartupError) as caught:
        full_name("org/name@v1", EngineOptions(**options))
    assert str(caught.value).startswith(text)


def folder_with(path: Path, text: Mapping[str, object]) -> Path:
    """Return a copy of the tiny model with another config.json."""
    shutil.copytree(TINY_LLAMA, path, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    (path / "config.json").write_text(json.dumps(text))
    return path


@pytest.mark.parametrize(
    ("text", "overrides", "same_as"),
    [
        (TEXT, {"rope_scaling": YARN}, {"rope_parameters": YARN | {"rope_theta": 1e4}}),
        (TEXT, {"rope_scaling": LINEAR}, {"rope_parameters": LINEAR | {"rope_theta": 1e4}}),
        (TEXT, {"rope_parameters": YARN}, {"rope_parameters": YARN | {"rope_theta": 1e4}}),
        (TEXT, {"rope_parameters": YARN | {"rope_theta": 7.0}},
         {"rope_parameters": YARN | {"rope_theta": 7.0}}),
        (TEXT, {"rope_theta": 9e4}, {"rope_parameters": {"rope_theta": 9e4}}),
        (TEXT, {"rope_theta": 9e4, "rope_scaling": YARN},
         {"rope_parameters": YARN | {"rope_theta": 9e4}}),
        (TEXT | {"rope_parameters": YARN}, {"rope_scaling": None}, {"rope_parameters": {}}),
        (TEXT, {"max_position_embeddings": 512}, {"max_position_embeddings": 512}),
        (TEXT, {"num_hidden_layers": 2}, {"num_hidden_layers": 2}),
        (OLD_TEXT, {"rope_scaling": YARN}, {"rope_scaling": YARN}),
        (OLD_TEXT, {"rope_parameters": YARN}, {"rope_scaling": YARN}),
        (OLD_TEXT, {"rope_theta": 9e4}, {"rope_theta": 9e4}),
        (OLD_TEXT | {"rope_scaling": LINEAR}, {"rope_parameters": YARN}, {"rope_scaling": YARN}),
        (OLD_TEXT | {"rope_scaling": LINEAR}, {"rope_scaling": None}, {"rope_scaling": None}),
        (OLD_TEXT | {"rope_scaling": LINEAR | {"rope_theta": 2.0}}, {"rope_theta": 9e4},
         {"rope_theta": 9e4, "rope_scaling": LINEAR}),
    ],
)  # fmt: skip
def test_overrides_are_as_if_the_file_had_them(
    tmp_path: Path, text: dict[str, Any], overrides: dict[str, Any], same_as: dict[str, Any]
) -> None:
    found = read_model_config(folder_with(tmp_path / "a", text), overrides=overrides)
    expected = read_model_config(folder_with(tmp_path / "b", text | same_as))
    assert found != read_model_config(tmp_path / "a")
    assert replace(found, folder=Path(), name="") == replace(expected, folder=Path(), name="")


PUBLISHED = Path(__file__).parents[1] / "workers" / "models" / "families" / "published"


MROPE_YARN = {
    "mrope_interleaved": True,
    "mrope_section": [24, 20, 20],
    "rope_type": "yarn",
    "factor": 3.0,
    "original_max_position_embeddings": 262144,
}


@pytest.mark.parametrize(
    ("model", "overrides", "max_positions"),
    [
        ("qwen3-vl-4b", {"rope_scaling": MROPE_YARN}, 3 * 262144),
        ("qwen3-vl-4b", {"rope_parameters": MROPE_YARN}, 3 * 262144),
        ("qwen3-vl-4b", {"rope_theta": 1e7}, 262144),
        ("qwen3-vl-4b", {"max_position_embeddings": 4096}, 4096),
        ("gemma-3-27b", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 131072),
        ("gemma-3-27b", {"rope_theta": 5e5}, 131072),
        ("gemma-3-27b", {"sliding_window": 512}, 131072),
    ],
)
def test_overrides_of_the_text_model(
    tmp_path: Path, model: str, overrides: dict[str, Any], max_positions: int
) -> None:
    text = json.loads((PUBLISHED / f"{model}.json").read_text())["config"]
    folder = folder_with(tmp_path / "a", text)
    given = read_model_config(folder, overrides={"text_config": overrides})
    if "rope" in "".join(overrides):
        assert given == read_model_config(folder, overrides=overrides)
    edited = overrides | {"rope_scaling": overrides.get("rope_parameters")}
    if "rope_parameters" not in overrides:
        edited = overrides
    text["text_config"] |= edited
    text["text_config"].pop("rope_parameters", None)
    expected = read_model_config(folder_with(tmp_path / "b", text))
    assert replace(given, folder=Path(), name="") == replace(expected, folder=Path(), name="")
    assert given.max_positions == max_positions
    assert given != read_model_config(tmp_path / "a")


def test_yarn_extends_the_context() -> None:
    found = [
        engine_config(TINY_LLAMA, options)
        for options in (
            replace(OPTIONS, hf_overrides={"rope_scaling": YARN}, max_model_len=4096),
            replace(engine_options({"rope_scaling": YARN, "max_model_len": "4K"}), device="cpu"),
        )
    ]
    assert [one.max_model_len for one in found] == [4096, 4096]
    assert {one.model.rope and one.model.rope.kind for one in found} == {"yarn"}


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"attention_chunk": 3}, "attention_chunk is not a field of LlamaForCausalLM"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope_type must be one of"),
        ({"rope_scaling": YARN | {"magic": 1}}, "magic is not a field"),
        ({"rope_scaling": 3}, "rope_scaling must be an object, not 3"),
        ({"rope_scaling": YARN, "rope_parameters": LINEAR}, "cannot be overridden with rope_param"),
        ({"num_hidden_layers": "x"}, "num_hidden_layers must be an integer"),
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
    ],
)
def test_overrides_that_are_not_understood_are_rejected_by_name(
    overrides: dict[str, Any], text: str
) -> None:
    with pytest.raises(StartupError, match=text):
        engine_config(TINY_LLAMA, replace(OPTIONS, hf_overrides=overrides))


def test_defaults_of_requests_may_be_overridden(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "a", TEXT)
    (folder / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 20}')
    given: dict[str, object] = {"temperature": 0.6, "top_k": None, "min_p": 0.1}
    for source, expected in (
        ("auto", {"temperature": 0.6, "min_p": 0.1}),
        ("none", {"temperature": 0.6, "min_p": 0.1}),
    ):
        options = replace(OPTIONS, generation_config=source, override_generation_config=given)
        assert dict(engine_config(folder, options).sampling_defaults) == expected


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"max_new_tokens": 9}, "override_generation_config.max_new_tokens is not supported: the"),
        ({"temperature": "hot"}, "override_generation_config: temperature must be a number"),
        ({"top_p": 2}, "override_generation_config: top_p must be"),
    ],
)
def test_other_defaults_are_rejected(given: dict[str, Any], text: str) -> None:
    with pytest.raises(StartupError) as caught:
        engine_config(TINY_LLAMA, replace(OPTIONS, override_generation_config=given))
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"runner": "auto", "convert": "auto"}, "generate"),
        ({"runner": "generate"}, "generate"),
        ({"runner": "pooling"}, "embed"),
        ({"runner": "pooling", "convert": "embed"}, "embed"),
        ({"convert": "embed", "runner": "pooling"}, "embed"),
        ({"convert": "none", "task": "embedding"}, "embed"),
    ],
)
def test_runner_and_convert_are_the_task(given: dict[str, object], expected: str) -> None:
    options = replace(engine_options(given), device="cpu")
    assert engine_config(TINY_LLAMA, options).model.task == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("FLASH_ATTN", "auto"),
        ("flash_attn", "auto"),
        ("TRITON_ATTN", "auto"),
        ("FLASHMLA", "auto"),
        ("FLASHINFER_MLA", "auto"),
        ("CUTLASS_MLA", "auto"),
        ("FLEX_ATTENTION", "auto"),
        ("TREE_ATTN", "auto"),
        ("ROCM_AITER_FA_ATTN", "auto"),
        ("PALLAS", "auto"),
        ("FLASHINFER", "flashinfer"),
        ("TORCH_SDPA", "torch_sdpa"),
        ("XFORMERS", "xformers"),
        ("hybrid", "hybrid"),
        ("DUAL_CHUNK_FLASH_ATTN", "DUAL_CHUNK_FLASH_ATTN"),
    ],
)
def test_attention_backends_of_vllm_are_ours_or_automatic(
    name: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    options = replace(engine_options({"attention_backend": name}), device="cpu")
    assert engine_config(TINY_LLAMA, options).attention_backend == expected
    line = f"attention_backend {name} has no effect: auto selects the fastest backend"
    assert (line in caplog.text) == (expected == "auto")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"distributed_executor_backend": "mp"}, "local"),
        ({"distributed_executor_backend": "mp", "tensor_parallel_size": 2}, "ray"),
        ({"executor": "mp", "tensor_parallel_size": "2"}, "ray"),
        ({"distributed_executor_backend": "uni"}, "local"),
        ({"distributed_executor_backend": "ray"}, "ray"),
    ],
)
def test_several_ranks_run_on_ray(given: dict[str, object], expected: str) -> None:
    assert own_options(given)["executor"] == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rope_scaling": YARN, "rope_theta": 1e6}, {"rope_scaling": YARN, "rope_theta": 1e6}),
        ({"rope_theta": 5.0, "hf_overrides": {"a": 1}}, {"a": 1, "rope_theta": 5.0}),
        ({"hf_overrides": '{"a": {"b": [1]}}', "rope_scaling": None}, {"a": {"b": [1]}}),
    ],
)
def test_rope_options_are_overrides(given: dict[str, object], expected: object) -> None:
    assert engine_options(given).hf_overrides == expected


def write(folder: Path, values: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_auto_is_the_models_file(tmp_path: Path) -> None:
    assert sampling_defaults("auto", tmp_path) == ()
    write(tmp_path, GIVEN)
    expected = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert dict(sampling_defaults("auto", tmp_path)) == expected
    assert sampling_defaults("none", tmp_path) == sampling_defaults("vllm", tmp_path) == ()


def test_a_folder_takes_its_place(tmp_path: Path) -> None:
    other = write(tmp_path / "other", {"temperature": 0, "min_p": 0.1, "top_k": None})
    assert dict(sampling_defaults(other, write(tmp_path, GIVEN))) == {
        "temperature": 0,
        "min_p": 0.1,
    }


@pytest.mark.parametrize(
    ("values", "text"),
    [({"temperature": "hot"}, "temperature must be a number"), ({"top_p": 2}, "top_p must be")],
)
def test_invalid_values_name_the_file(tmp_path: Path, values: object, text: str) -> None:
    with pytest.raises(StartupError, match=rf"generation_config.json: {text}"):
        sampling_defaults("auto", write(tmp_path, values))


def test_a_folder_without_the_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="must be auto, none or a folder"):
        sampling_defaults(tmp_path, tmp_path)


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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ({}, None),
        ({"num_speculative_tokens": 3}, SpeculationConfig(num_speculative_tokens=3)),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5},
            SpeculationConfig(num_speculative_tokens=3, prompt_lookup_min=5, prompt_lookup_max=5),
        ),
        (
            {"model": "[ngram]", "num_speculative_tokens": 1, "prompt_lookup_min": 3, "x": None},
            SpeculationConfig(num_speculative_tokens=1, prompt_lookup_min=3, prompt_lookup_max=3),
        ),
        ({"method": "suffix"}, SpeculationConfig(method="suffix", num_speculative_tokens=24)),
        (
            {"method": "suffix", "suffix_decoding_max_tree_depth": 16},
            SpeculationConfig(
                method="suffix", num_speculative_tokens=16, suffix_decoding_max_tree_depth=16
            ),
        ),
        (
            {
                "method": "suffix",
                "num_speculative_tokens": 5,
                "suffix_decoding_max_cached_requests": 100,
                "suffix_decoding_max_spec_factor": 2,
                "suffix_decoding_min_token_prob": 0.5,
            },
            SpeculationConfig(
                method="suffix",
                num_speculative_tokens=5,
                suffix_decoding_max_cached_requests=100,
                suffix_decoding_max_spec_factor=2.0,
                suffix_decoding_min_token_prob=0.5,
            ),
        ),
    ],
)
# Any: JSON
def test_speculation_has_fields_of_vllm(
    given: dict[str, Any] | None, expected: SpeculationConfig | None
) -> None:
    assert speculation_config(given) == expected


@pytest.mark.parametrize("name", ["prompt_lookup_min", "prompt_lookup_max"])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "{} must be 1 or more, not 0."),
        (-3, "{} must be 1 or more, not -3."),
        (True, "speculative_config is invalid: Expected `int`, got `bool` - at `$.{}`."),
        ("x", "speculative_config is invalid: Expected `int`, got `str` - at `$.{}`."),
    ],
)
def test_a_wrong_length_is_reported_by_its_own_name(name: str, value: object, text: str) -> None:
    with pytest.raises(StartupError) as caught:
        speculation_config({"num_speculative_tokens": 3, name: value})
    assert str(caught.value) == text.format(name)


def test_speculation_under_other_names() -> None:
    given = {"spec_tokens": 5, "speculative_config": {"method": "ngram"}, "spec_method": "suffix"}
    assert own_options(given) == {
        "speculative_config": {"method": "suffix", "num_speculative_tokens": 5}
    }
    for name in ("speculative_algorithm", "speculative_model"):
        with pytest.raises(StartupError, match=rf"^{name} is not an option; use speculative_conf"):
            own_options({name: "x"})
    with pytest.raises(StartupError, match=r"^num_speculative_tokens is not supported: use spe"):
        own_options({"num_speculative_tokens": 5})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"method": "medusa", "num_speculative_tokens": 3}, "method medusa is not supported; use"),
        (
            {"method": "draft_model", "num_speculative_tokens": 3},
            "model must be the draft model for method draft_model",
        ),
        (
            {"method": "suffix", "model": "head", "num_speculative_tokens": 3},
            "model has no effect with method suffix; remove one of them",
        ),
        ({"method": "dflash"}, "method dflash is not supported; use ngram, suffix, "),
        (
            {"num_speculative_tokens": 3, "quantization": "fp8"},
            "quantization is not supported; ",
        ),
        ({"num_speculative_tokens": "3"}, r"is invalid: Expected `int`, got `str` - at `\$.num_sp"),
        ({"method": "ngram"}, "is invalid: Object missing required field `num_speculative_tokens`"),
        (
            {"method": ["ngram"], "num_speculative_tokens": 3},
            r"method \['ngram'\] is not supported",
        ),
    ],
)
def test_speculation_that_is_not_supported(
    given: dict[str, Any],  # Any: JSON
    text: str,
) -> None:
    with pytest.raises(StartupError, match=rf"^speculative_config[. ]{text}"):
        speculation_config(given)


@pytest.mark.parametrize("given", [{"model": "\0"}, {"method": "a\nb"}, {"\ud800": 1}])
def test_speculation_has_printable_fields(given: dict[str, Any]) -> None:  # Any: JSON
    options = EngineOptions(speculative_config={"num_speculative_tokens": 3, **given})
    with pytest.raises(StartupError, match=r"^speculative_config may only contain .*\\.*'\.$"):
        engine_config(TINY_LLAMA, options)


def test_model_without_a_name_is_no_draft_model() -> None:
    options = EngineOptions(speculative_config={"model": "", "num_speculative_tokens": 3})
    with pytest.raises(StartupError, match="model must be the draft model for method draft_model"):
        engine_config(TINY_LLAMA, options)
