"""GGUF files are read as the models that llama.cpp made them of."""

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import load_file, save_file
from transformers.convert_slow_tokenizer import bytes_to_unicode

from pagedray import SamplingParams
from pagedray.errors import CheckpointError
from pagedray.weight_format import Int4Format
from tests.downloads.small_hub import SmallHub
from tests.greedy import local_llm
from tests.small_models.checkpoints import greedy_continuations
from workers.hub.gguf_folder import files_of
from workers.hub.locate import locate_model
from workers.hub.model_name import HubSettings
from workers.layers.formats.int4_weight import Int4Weight
from workers.layers.weight import MatrixPart
from workers.weights.gguf_tensors import GgufModel

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
# Positions of the float16 scales in a block of the types that `gguf` cannot quantize to.
SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
TOKENS = ["<s>", "</s>", *sorted(bytes_to_unicode().values()), "th", "the", "\u0120the"]
PAIRED = ("llama", "granite", "smollm3")
MERGES = ["t h", "th e", "\u0120 the"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # Any: fields of all types
    "llama": ("Llama", {}),
    "granite": (
        "Granite",
        {
            "attention_multiplier": 0.25,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "olmo2": ("Olmo2", {}),
    # Every fourth layer has no rope.
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": ("Phi3", {"sliding_window": 9, "partial_rotary_factor": 0.75}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 64}),
    "qwen3moe": (
        "Qwen3Moe",
        {
            "head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "norm_topk_prob": True,
        },
    ),
    "gemma": ("Gemma", {"head_dim": 64}),
    "gemma2": ("Gemma2", {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 9}),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": 9,
            "layer_types": ["sliding_attention"] * 2,
        },
    ),
}


def quantized(values: np.ndarray[Any, Any], name: str, random: np.random.Generator) -> Any:
    """Return the rows of a matrix in blocks of a type; the types of llama.cpp alone are random."""
    kind = GGMLQuantizationType[name]
    if name not in SCALES:
        return gguf.quants.quantize(values, kind)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    shape = (*values.shape[:-1], values.shape[-1] // block_size, block_bytes)
    blocks = random.integers(0, 256, shape, dtype=np.uint8)
    for place in SCALES[name]:
        scales = random.uniform(1e-5, 6e-5, shape[:-1]).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def in_pairs(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Return the rows of queries or keys as llama.cpp stores them."""
    return rows.reshape(num_heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def save_hf_model(folder: Path, family: str, more: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Save a random model of transformers, and return its tensors."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(
        **{**SIZES, **more, "vocab_size": len(TOKENS)}
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_(std=0.2).add_("gemma" not in family.lower())
        elif name.endswith("bias"):
            parameter.data.normal_(std=0.2)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def write_gguf(
    path: Path, folder: Path, architecture: str, type_name: str, *, split_max_tensors: int = 0
) -> None:
    """Convert a model to a GGUF file as llama.cpp does; the folder gets the dequantized weights."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    stored_name = "llama" if architecture == "mixtral" else architecture
    writer = gguf.GGUFWriter(path, stored_name, split_max_tensors=split_max_tensors)
    write_metadata(writer, config, stored_name)
    kinds = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[stored_name], config["num_hidden_layers"])
    random = np.random.default_rng(2)
    experts: defaultdict[str, dict[int, Any]] = defaultdict(dict)
    dequantized = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        values = tensor.float().numpy()
        rows, its_type = values, "F32"
        if len(values.shape) == 2 and "norm" not in name and not stem.endswith(".gate"):
            rows, its_type = quantized(values, type_name, random), type_name
            restored = gguf.quants.dequantize(rows, GGMLQuantizationType[its_type])
            values = restored.reshape(values.shape)
        dequantized[name] = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        if stored_name in PAIRED and (match := re.search(r"\.([qk])_proj$", stem)):
            key = "num_attention_heads" if match[1] == "q" else "num_key_value_heads"
            matrix = rows if len(rows.shape) == 2 else rows[:, None]
            rows = in_pairs(matrix, config[key]).reshape(rows.shape)
        if "gemma" in architecture and "norm" in name:
            rows = rows + 1
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)", stem):
            experts[f"{match[1]}.{match[3]}"][int(match[2])] = rows
            continue
        target = names.get_name(stem)
        assert target is not None, stem
        add_tensor(writer, f"{target}.{kind}", rows, its_type)
    for stem, by_number in experts.items():
        short = stem.replace("model.", "").replace("block_sparse_moe", "feed_forward")
        target = names.get_name(stem) or names.get_name(short)
        assert target is not None, stem
        stacked = np.stack([by_number[number] for number in sorted(by_number)])
        add_tensor(writer, f"{target}.weight", stacked, type_name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(dequantized, folder / "model.safetensors", {"format": "pt"})


def add_tensor(writer: gguf.GGUFWriter, name: str, rows: Any, type_name: str) -> None:
    kind = GGMLQuantizationType[type_name]
    writer.add_tensor(name, np.ascontiguousarray(rows), raw_dtype=kind)


def write_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    rope = config.get("rope_parameters", config)
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if architecture == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if num_experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if size := config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(size)
    if window := config.get("sliding_window"):
        writer.add_sliding_window(window)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, *[1] * (len(TOKENS) - 2)])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


def check_equal(tmp_path: Path, architecture: str, type_name: str) -> None:
    folder = tmp_path / "transformers"
    family, more = MODELS[architecture]
    save_hf_model(folder, family, more)
    path = tmp_path / f"{architecture}.gguf"
    write_gguf(path, folder, architecture, type_name)
    prompts = [[5, 9, 130, 17, 40], list(range(60, 90))]
    expected = greedy_continuations(folder, prompts, 12)
    with local_llm(path, dtype="float32", num_blocks=64) as llm:
        sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
    for output, (token_ids, logprobs) in zip(outputs, expected, strict=True):
        generation = output.outputs[0]
        assert list(generation.token_ids) == token_ids
        assert generation.logprobs is not None
        found = [next(iter(position.values())).logprob for position in generation.logprobs]
        assert found == pytest.approx(logprobs, abs=1e-4)


def test_shards_are_read_as_one_model(tmp_path: Path) -> None:
    folder = tmp_path / "transformers"
    save_hf_model(folder, *MODELS["llama"])
    write_gguf(tmp_path / "tiny.gguf", folder, "llama", "Q8_0", split_max_tensors=8)
    first, second, *_ = sorted(tmp_path.glob("tiny-*.gguf"))
    model = GgufModel.read(first)
    assert len(model.tensors) == 2 * 9 + 3
    assert len({tensor.path for tensor in model.tensors.values()}) == 3
    with local_llm(first, dtype="float32", num_blocks=64) as llm:
        sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        output = llm.generate([[5, 9, 130]], sampling, use_tqdm=False)[0]
    assert (
        list(output.outputs[0].token_ids) == greedy_continuations(folder, [[5, 9, 130]], 12)[0][0]
    )
    with pytest.raises(CheckpointError, match="is shard 2; give the first of 3 shards"):
        GgufModel.read(second)
    second.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        GgufModel.read(first)


def test_the_file_of_a_hub_repository_is_named_by_a_part_of_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "transformers"
    family, more = MODELS["llama"]
    save_hf_model(folder, family, more)
    path = tmp_path / "model.gguf"
    write_gguf(path, folder, "llama", "Q8_0")
    content = path.read_bytes()
    with SmallHub() as hub:
        settings = HubSettings(endpoint=hub.url, cache=tmp_path / "hub", retry_s=0.01)
        hub.push(
            "org/tiny-GGUF", {"tiny-Q8_0.gguf": content, "tiny-Q4_0.gguf": b"", "README.md": b""}
        )
        located = locate_model("org/tiny-GGUF:q8_0", settings=settings)
        assert located.gguf == "tiny-Q8_0.gguf"
        assert (located.folder / "model.gguf").read_bytes() == content
        config = json.loads((located.folder / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
        for name in ("org/tiny-GGUF", "org/tiny-GGUF:Q", "org/tiny-GGUF:Q6_K"):
            with pytest.raises(
                CheckpointError, match=r"files are tiny-Q4_0\.gguf, tiny-Q8_0\.gguf"
            ):
                locate_model(name, settings=settings)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("tokenizer.ggml.pre", "unheard-of", "pre 'unheard-of' is not supported"),
        ("tokenizer.ggml.model", "t5", "model 't5' is not supported"),
        ("general.architecture", "rwkv7", "architecture 'rwkv7' is not supported in GGUF"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(
    tmp_path: Path, key: str, value: str, problem: str
) -> None:
    folder = tmp_path / "transformers"
    save_hf_model(folder, *MODELS["llama"])
    path = tmp_path / "model.gguf"
    write_gguf(path, folder, "llama", "F32")
    model = GgufModel.read(path)
    changed = replace(model, metadata={**model.metadata, key: value})
    with pytest.raises(CheckpointError) as error:
        files_of(changed)
    assert problem in str(error.value)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("type_name", TYPES)
def test_weights_of_each_type_equal_their_dequantized_values(
    tmp_path: Path, type_name: str
) -> None:
    check_equal(tmp_path, "llama", type_name)


@pytest.mark.parametrize("architecture", [name for name in MODELS if name != "llama"])
def test_each_architecture_equals_transformers(tmp_path: Path, architecture: str) -> None:
    check_equal(tmp_path, architecture, "Q8_0")


@pytest.mark.parametrize("type_name", ["Q4_1", "Q4_K", "Q5_0", "Q6_K"])
def test_kept_numbers_are_multiplied_in_bfloat16(tmp_path: Path, type_name: str) -> None:
    folder = tmp_path / "transformers"
    save_hf_model(folder, "Llama", {"tie_word_embeddings": True})
    path = tmp_path / "model.gguf"
    write_gguf(path, folder, "llama", type_name)
    kept = GgufModel.read(path).kept_formats()
    assert len(kept) == 2 * 7 + 1
    assert "lm_head" in kept
    prompt = list(range(60, 120))
    found = []
    for dtype in ("float32", "bfloat16"):
        with local_llm(path, dtype=dtype, num_blocks=64) as llm:
            sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
            positions = llm.generate([prompt], sampling, use_tqdm=False)[0].prompt_logprobs
        assert positions is not None
        pairs = zip(prompt[1:], positions[1:], strict=True)
        found.append([position[token].logprob for token, position in pairs if position])
    assert max(found[0]) - min(found[0]) > 0.5
    assert found[1] == pytest.approx(found[0], abs=0.06)


def test_rows_beyond_the_vocabulary_are_zero() -> None:
    format = Int4Format(packing="gguf", group_size=32, has_zeros=False, has_minimums=True)
    weight = Int4Weight(format, 5, 32, device=torch.device("cpu"))
    source = MatrixPart(name="lm_head", shape=(9, 32), part=(slice(5, 9), slice(None)))
    for shard in weight.weight_shards(source, slice(0, 4)):
        shard.target.fill_(1)
    weight.finalize()
    values = weight.dequantized(torch.float32)
    assert values.shape == (5, 32)
    assert values[:4].count_nonzero() == 4 * 32
    assert not values[4].any()
