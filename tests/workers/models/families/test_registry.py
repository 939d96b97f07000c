"""`config.json` to `ModelConfig`: every family, both spellings, and unsupported values."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedray.errors import CheckpointError
from pagedray.model_config import ModelConfig, RopeConfig, TextTensors
from tests.workers.models.families.llama_config import read_llama, written_llama
from tests.workers.reference import save_checkpoint
from tests.workers.reference_cases import CASES
from workers.models.families.registry import (
    FAMILY_BY_NAME,
    read_model_config,
)

DOCUMENT = Path(__file__).parents[4] / "docs" / "models.md"


def _message(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_model_config(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_plain_keys_are_read(tmp_path: Path) -> None:
    config = read_llama(tmp_path)
    assert config == ModelConfig(
        name=tmp_path.name,
        folder=tmp_path,
        architecture="LlamaForCausalLM",
        vocab_size=100,
        hidden_size=48,
        intermediate_size=96,
        num_layers=4,
        num_heads=6,
        num_kv_heads=3,
        head_size=8,
        max_positions=128,
        norm_eps=1e-5,
        dtype="bfloat16",
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize(
    ("spelling", "rope"),
    [
        ({}, RopeConfig()),
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_scaling": None, "rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5}}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 9}, RopeConfig(theta=9.0)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(kind="linear", factor=2.0),
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0}},
            RopeConfig(kind="linear", theta=7.0, factor=2.0),
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
            RopeConfig(
                kind="llama3",
                theta=5e5,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_positions=64,
            ),
        ),
    ],
)
def test_rope_is_read_in_both_spellings(
    spelling: dict[str, Any], rope: RopeConfig, tmp_path: Path
) -> None:
    assert read_llama(tmp_path, **spelling).rope == rope


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": ..., "dtype": "float32"}, "float32"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"torch_dtype": "float16", "dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": ...}, "float32"),
    ],
)
def test_dtype_is_read_in_both_spellings(
    spelling: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    assert read_llama(tmp_path, **spelling).dtype == dtype


YARN = {"rope_type": "yarn", "factor": 4.0}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 7,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 21,
}
BERT = {
    "architectures": ["BertModel"],
    "hidden_act": "gelu",
    "num_key_value_heads": ...,
    "rms_norm_eps": ...,
}
ROBERTA = BERT | {"architectures": ["XLMRobertaModel"], "pad_token_id": 1}


@pytest.mark.parametrize(
    ("base", "field"),
    [
        ({}, {"activation": "swiglu"}),
        ({}, {"auto_map": {"AutoModelForCausalLM": "modeling_flash_llama.LlamaForCausalLM"}}),
        ({}, {"custom_pipelines": {"feature-extraction": {"impl": "x.Y"}}}),
        ({}, {"_attn_implementation": "eager", "_name_or_path": "x"}),
        ({}, {"mlp_bias": False, "pretraining_tp": 1, "use_cache": True}),
        ({}, {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 3}),
        ({}, {"unsloth_fixed": True, "rope_interleaved": False, "is_llama_config": True}),
        (QWEN3, {"use_qk_norm": True}),
        (QWEN3, {"sliding_window": 32768, "max_window_layers": 28, "use_sliding_window": False}),
        (QWEN3_MOE, {"use_qk_norm": True, "qkv_bias": False}),
        (QWEN3_MOE, {"shared_expert_intermediate_size": 0, "router_aux_loss_coef": 0.001}),
        (BERT, {"export_model_type": "transformer"}),
        (BERT, {"matryoshka_dimensions": [256], "classifier_dropout": None}),
        (BERT, {"directionality": "bidi", "pooler_type": "first_token_transform"}),
        (ROBERTA, {"export_model_type": "transformer", "output_past": True}),
    ],
)
def test_fields_without_effect_are_accepted(
    base: dict[str, Any], field: dict[str, Any], tmp_path: Path
) -> None:
    assert read_llama(tmp_path, **base, **field) == read_llama(tmp_path, **base)


@pytest.mark.parametrize("factor", [0.8782488562869419, 2.0])
def test_the_authors_factor_of_yarn_has_no_effect_as_in_transformers(
    factor: float, tmp_path: Path
) -> None:
    config = read_llama(tmp_path, rope_scaling=YARN | {"attn_factor": factor})
    assert config.rope == read_llama(tmp_path, rope_scaling=YARN).rope


@pytest.mark.parametrize(
    ("base", "field"),
    [
        ({}, {"activation": "geglu"}),
        ({}, {"use_qk_norm": True}),
        (QWEN3, {"use_qk_norm": False}),
        (QWEN3, {"qkv_bias": True}),
        (QWEN3_MOE, {"use_qk_norm": False}),
        (QWEN3_MOE, {"shared_expert_intermediate_size": 512}),
        (BERT, {"use_qk_norm": True}),
        ({}, {"rope_interleaved": True}),
        ({}, {"sliding_window": 4096}),
        ({}, {"sliding_window": 4096, "use_sliding_window": True}),
        ({}, {"dual_chunk_attention_config": {"chunk_size": 4}}),
    ],
)
def test_fields_that_could_change_the_result_are_rejected_by_name(
    base: dict[str, Any], field: dict[str, Any], tmp_path: Path
) -> None:
    assert f": {next(iter(field))} " in _message(written_llama(tmp_path, **base, **field)).replace(
        "dual_chunk_attention_config.chunk_size", "dual_chunk_attention_config"
    )


def test_a_given_dtype_overrules_the_file(tmp_path: Path) -> None:
    assert read_model_config(written_llama(tmp_path), dtype="float32").dtype == "float32"


def test_end_tokens_of_both_files_are_merged(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 3, 500]}')
    assert read_llama(tmp_path, eos_token_id=[3, 5]).eos_token_ids == (3, 5, 7)
    assert read_llama(tmp_path, eos_token_id=None).eos_token_ids == (7, 3)


def test_switches_of_llama(tmp_path: Path) -> None:
    config = read_llama(tmp_path, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert config.has_qkv_bias
    assert config.has_output_bias
    assert config.has_mlp_bias
    assert config.has_tied_embeddings


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (4096,) * 4),
        ({"sliding_window": 9}, (9,) * 4),
        ({"sliding_window": None}, ()),
    ],
)
def test_windows_of_mistral(
    changes: dict[str, Any], windows: tuple[int, ...], tmp_path: Path
) -> None:
    config = read_llama(tmp_path, architectures=["MistralForCausalLM"], **changes)
    assert config.sliding_windows == windows


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 9}, ()),
        ({"sliding_window": None, "use_sliding_window": True}, ()),
        ({"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0}, ()),
        (
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3},
            (None, None, None, 9),
        ),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (9, None, 9, None),
        ),
    ],
)
@pytest.mark.parametrize("family", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_windows_of_qwen(
    family: str, changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    config = read_llama(tmp_path, architectures=[family], head_dim=8, **changes)
    assert config.sliding_windows == windows


def test_mimo_is_a_qwen2_with_layers_that_are_skipped(tmp_path: Path) -> None:
    more = {"attention_bias": True, "num_nextn_predict_layers": 1, "model_type": "mimo"}
    mimo = read_llama(tmp_path, architectures=["MiMoForCausalLM"], **more)
    qwen2 = read_llama(tmp_path, architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    assert mimo.text_tensors == TextTensors((), ("model.mtp_layers.",))
    assert mimo.mtp is not None
    assert replace(mimo, text_tensors=None, mtp=None) == qwen2


def test_switches_of_qwen(tmp_path: Path) -> None:
    second = read_llama(tmp_path, architectures=["Qwen2ForCausalLM"])
    assert second.has_qkv_bias
    assert not second.has_output_bias
    third = read_llama(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert third.has_qk_norm
    assert not third.has_qkv_bias
    assert third.head_size == 128


@pytest.mark.parametrize("name", CASES)
def test_what_transformers_writes_is_read(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    config = read_model_config(tmp_path)
    assert config.num_heads == CASES[name]["heads"]
    assert config.dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"architectures": ...}, ["architectures", "is missing", "Qwen3ForCausalLM"]),
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel is not", "Llama"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures", "list of strings"]),
        ({"vocab_size": ...}, ["vocab_size is missing"]),
        ({"hidden_size": None}, ["hidden_size is missing"]),
        ({"hidden_size": "48"}, ["hidden_size", 'not "48"']),
        ({"hidden_size": 48.0}, ["hidden_size", "not 48.0"]),
        ({"hidden_size": True}, ["hidden_size", "not true"]),
        ({"hidden_size": 0}, ["hidden_size", "from 1 to", "not 0"]),
        ({"num_hidden_layers": -1}, ["num_hidden_layers", "not -1"]),
        ({"vocab_size": 10**12}, ["vocab_size", "not 1000000000000"]),
        ({"vocab_size": 10**60}, ["vocab_size", "an integer of 200 bits"]),
        ({"intermediate_size": [96]}, ["intermediate_size", "not [96]"]),
        ({"num_attention_heads": 7}, ["num_attention_heads", "multiple", "3"]),
        ({"num_attention_heads": 9}, ["hidden_size", "multiple of num_attention_heads 9"]),
        ({"num_key_value_heads": 4}, ["num_key_value_heads 4", "not 6"]),
        ({"head_dim": 7}, ["head_dim must be even, not 7"]),
        ({"head_dim": "8"}, ["head_dim"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "silu", '"gelu"']),
        ({"rms_norm_eps": 0}, ["rms_norm_eps", "not 0"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "NaN"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings", "true or false"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["torch_dtype", "bfloat16", "float8_e4m3fn"]),
        ({"dtype": 3}, ["dtype", "not 3"]),
        ({"eos_token_id": "2"}, ["eos_token_id", 'not "2"']),
        ({"eos_token_id": [2, -1]}, ["eos_token_id", "not -1"]),
        ({"rope_theta": -1}, ["rope_theta", "not -1"]),
        ({"rope_scaling": {"rope_type": "axial", "factor": 2}}, ["rope_type", "llama3", "axial"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["rope_scaling.factor is missing"]),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 0.5}},
            ["rope_scaling.beta_fast must be more than beta_slow 1"],
        ),
        ({"rope_theta": 0.5, "rope_scaling": {"type": "yarn", "factor": 2}}, ["above 1, not 0.5"]),
        ({"rope_scaling": {"type": "linear", "factor": 2, "x": 1}}, ["rope_scaling.x is not a"]),
        ({"clip_qkv": 8.0}, ["clip_qkv is not a field of LlamaForCausalLM", "no effect"]),
        ({"logits_scaling": 8}, ["logits_scaling is not a field of LlamaForCausalLM"]),
        ({"model_type": "mistral"}, ['model_type must be one of llama, not "mistral"']),
        ({"is_encoder_decoder": True}, ["is_encoder_decoder must be false"]),
        ({"rope_scaling": {"factor": 2}}, ["rope_scaling.rope_type is missing"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor is missing"]),
        ({"rope_scaling": "linear"}, ["rope_scaling must be an object"]),
        (
            {"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 1}},
            ["rope_scaling.high_freq_factor is missing"],
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1}}}, ["full_attention"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor must be 1, not 0.5"]),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["full_attention"],
            },
            ["layer_types must have 4 entries, not 1"],
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["chunked_attention"] * 4,
            },
            ["layer_types", "'chunked_attention'", "full_attention"],
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, ["sliding_window"]),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    message = _message(written_llama(tmp_path, **changes))
    assert str(tmp_path / "config.json") in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("architecture", "sentences"),
    [
        ("Qwen2MoeForCausalLM", "supported. nearest Qwen3Moe;"),
        ("Qwen3VLMoeForConditionalGeneration", "supported. nearest Qwen3Moe;"),
        ("Qwen2VLForConditionalGeneration", "supported. nearest Qwen3;"),
        ("Gemma5ForConditionalGeneration", "supported. nearest Gemma4;"),
        ("Gemma3nForConditionalGeneration", "supported. nearest Gemma4;"),
        ("RecurrentGemmaForCausalLM", "has recurrent layers. Supported architectures include"),
        ("Llama4ForConditionalGeneration", "supported. nearest Llama;"),
        ("Glm5ForCausalLM", "supported. nearest Glm4;"),
        ("PhiForCausalLM", "supported. nearest Phi3;"),
        ("Phi4MMForCausalLM", "supported. nearest Phi3;"),
        ("CohereForCausalLM", "supported. nearest Cohere2;"),
        ("OlmoForCausalLM", "supported. nearest Olmo3;"),
        ("ModernBertModel", "supported. nearest Bert;"),
        ("DebertaV2ForSequenceClassification", "supported. nearest Bert;"),
        ("DeepseekV2ForCausalLM", "attention (MLA). Supported architectures include Llama"),
        ("DeepseekV3ForCausalLM", "attention (MLA). Supported architectures include Llama"),
        ("MambaForCausalLM", "has recurrent layers. Supported architectures include"),
        ("LlavaForConditionalGeneration", "supported. The supported multimodal families are"),
        ("InternVLChatModel", "supported. The supported multimodal families are Gemma3,"),
        ("OPTForCausalLM", "supported. Supported architectures include Llama"),
        ("x\ny", "supported. Supported architectures include Llama"),
        ("x" * 500, "supported. Supported architectures include Llama"),
    ],
)
def test_an_unsupported_architecture_is_named_with_the_nearest_family(
    architecture: str, sentences: str, tmp_path: Path
) -> None:
    message = _message(written_llama(tmp_path, architectures=[architecture]))
    problem = message.removeprefix(f"{tmp_path / 'config.json'}: ")
    assert sentences.replace("nearest", "The nearest supported family is") in problem
    assert problem.endswith("; docs/models.md lists all.")
    assert problem.count(". ") == 1
    assert len(problem) < 200


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "must contain a JSON object, not [1]"),
        ("", "is not valid JSON"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("\xff\xfe\xff", "is not valid JSON"),
    ],
)
def test_a_broken_file_is_named(text: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    message = _message(tmp_path)
    assert str(tmp_path / "config.json") in message
    assert part in message


def test_a_missing_folder_and_a_missing_file_are_named(tmp_path: Path) -> None:
    assert "is not a folder" in _message(tmp_path / "nowhere")
    assert "No config.json found" in _message(tmp_path)


def test_a_broken_generation_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{]")
    assert "generation_config.json" in _message(written_llama(tmp_path))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"num_experts_per_tok": 8}, "num_experts_per_tok must be an integer from 1 to 7, not 8"),
        ({"num_experts": 0}, "num_experts must be an integer from 1 to 4096, not 0"),
        ({"num_local_experts": 6}, "num_local_experts must be equal to num_experts 7"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers must be a list of integers from 0"),
        ({"scoring_func": "sigmoid"}, "scoring_func is not a field of Qwen3MoeForCausalLM"),
        ({"n_group": 2}, "n_group is not a field of Qwen3MoeForCausalLM"),
    ],
)
def test_experts_that_are_not_supported_are_named(
    changes: dict[str, Any], part: str, tmp_path: Path
) -> None:
    given = {"num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 21}
    with pytest.raises(CheckpointError) as caught:
        read_llama(tmp_path, architectures=["Qwen3MoeForCausalLM"], **given | changes)
    assert part in str(caught.value)


def test_both_names_of_the_number_of_experts_may_be_given(tmp_path: Path) -> None:
    given = {"num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 21}
    config = read_llama(
        tmp_path, architectures=["Qwen3MoeForCausalLM"], num_local_experts=7, **given
    )
    assert config.experts is not None
    assert config.experts.num_experts == 7


def test_the_documented_families_are_the_supported_ones() -> None:
    table = DOCUMENT.read_text().split("\n## Families\n")[1].split("\n## ")[0]
    columns = [line.split("|")[2] for line in table.splitlines() if line.startswith("|")]
    documented = [name for column in columns[2:] for name in re.findall(r"`(\w+)`", column)]
    assert sorted(documented) == sorted(FAMILY_BY_NAME)
