"""Makes a folder in the format of transformers from the metadata of a GGUF file.

The folder has config.json, tokenizer.json, tokenizer_config.json, generation_config.json and a link
to the file, whose tensors are read in place. It lies in the user's cache, under a name that changes
with the file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedray.errors import CheckpointError
from workers.hub.gguf_tokenizer import tokenizer_files
from workers.weights.gguf_tensors import GgufModel
from workers.weights.tensor_entries import GGUF_LINK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from workers.weights.gguf_file import Value

__all__ = ["files_of", "gguf_folder"]

logger = logging.getLogger(__name__)

_VERSION = 2
"""Changes when the same file would give other files."""
_SUFFIX = ".gguf"
_GLOBAL_EVERY = 6
"""One of so many layers of Gemma 3 has no window."""
# The factors of Llama 3.1 and later, apart from the largest, which the file tells.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_CONTEXT = 8192
_TOLERANCE = 1e-3
_MAX_FACTORS = 2**12
_MAX_CONTEXT = 2**22
"""Tokens; the table of the rope takes about a kilobyte for each."""


def gguf_folder(path: Path, cache: Path | None = None) -> Path:
    """Return the folder of a GGUF file, or of the first of its shards; make it if necessary.

    `cache` is the folder of all such folders. Raises CheckpointError.
    """
    # Shards are found by the name of the first, which a link of the Hub's cache has.
    path = path.absolute()
    root = cache or _default_cache()
    try:
        folder = root / f"{path.name.removesuffix(_SUFFIX)}-{_digest(path)}"
        if not folder.is_dir():
            _make(path, folder)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path} cannot be read or written: {error.strerror}."
        ) from None
    return folder


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedray" / "gguf"


def _digest(path: Path) -> str:
    state = path.stat()
    identity = (_VERSION, str(path), state.st_size, state.st_mtime_ns)
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:16]


def _make(path: Path, folder: Path) -> None:
    files = files_of(GgufModel.read(path))
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when it is complete: several processes may make it at the same time.
    draft = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        for name, text in files.items():
            (draft / name).write_text(text, encoding="utf-8")
        (draft / GGUF_LINK).symlink_to(path)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    logger.info("Made %s from the metadata of %s", folder, path)


def files_of(model: GgufModel) -> dict[str, str]:
    """Return the text of each file by its name."""
    fields = _Fields(model)
    config = _config(model, fields)
    # Unknown tensors are refused before a folder is made.
    model.entries()
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > config["vocab_size"]:
        raise CheckpointError(
            f"{model.path} has {len(tokens)} tokens, but {config['vocab_size']} embeddings."
        )
    files: dict[str, Any] = {  # Any: JSON
        "config.json": config,
        "generation_config.json": _generation_config(model.metadata),
        **tokenizer_files(model.path, model.metadata),
    }
    return {name: json.dumps(values, ensure_ascii=False) for name, values in files.items()}


class _Fields:
    """The metadata of the architecture. Methods raise CheckpointError."""

    def __init__(self, model: GgufModel) -> None:
        self._path = model.path
        self._metadata = model.metadata
        self._prefix = str(model.metadata.get("general.architecture"))

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer."""
        value = self.number(key, default)
        if not isinstance(value, int):
            raise self.error(key, f"must be an integer, not {value!r:.60}")
        return value

    def number(self, key: str, default: float | None = None) -> Any:  # Any: int or float
        """Return a number."""
        value = self._metadata.get(f"{self._prefix}.{key}", default)
        if isinstance(value, np.ndarray) and len(set(value.tolist())) == 1:
            # A value for each layer.
            value = value.tolist()[0]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"must be one number for all layers, not {value!r:.60}")
        # Such as 1e-5, which a float32 cannot represent.
        return value if isinstance(value, int) else float(f"{value:.7g}")

    def error(self, key: str, problem: str) -> CheckpointError:
        """Return an error about a field."""
        return CheckpointError(f"{self._path}: {self._prefix}.{key} {problem}.")

    def word(self, key: str, default: str) -> str:
        """Return a string."""
        value = self._metadata.get(f"{self._prefix}.{key}", default)
        if not isinstance(value, str):
            raise self.error(key, "must be a string")
        return value


def _config(model: GgufModel, fields: _Fields) -> dict[str, Any]:  # Any: JSON
    architecture = model.architecture
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{model.path}: the architecture {architecture!r:.60} is not supported in GGUF; "
            f"supported architectures are {', '.join(sorted(_ARCHITECTURES))}."
        )
    name, model_type, more = _ARCHITECTURES[architecture]
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    num_layers, context = fields.integer("block_count"), fields.integer("context_length")
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{model.path}: tensor token_embd.weight is missing.")
    num_tensors = len(model.tensors)
    if num_layers > num_tensors:
        raise CheckpointError(
            f"{model.path}: {num_layers} layers cannot have {num_tensors} tensors."
        )
    if context > _MAX_CONTEXT:
        raise CheckpointError(
            f"{model.path}: a context of {context} tokens is longer than {_MAX_CONTEXT}."
        )
    config = {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length", 0),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": fields.integer("attention.key_length", hidden_size // max(1, num_heads)),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context,
        "vocab_size": embedding.shape[0],
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "torch_dtype": "float32" if _is_float32(model) else "bfloat16",
        **_rope_scaling(model, fields),
        **_token_ids(model.metadata),
        **_quantization(model),
    }
    config |= more(config, fields)
    rotary_size = fields.integer("rope.dimension_count", config["head_dim"])
    if rotary_size != config["head_dim"]:
        if architecture != "phi3":
            raise fields.error(
                "rope.dimension_count",
                f"must be the size of a head, {config['head_dim']}, not {rotary_size}",
            )
        config["partial_rotary_factor"] = rotary_size / max(1, config["head_dim"])
    _check_shapes(model, config)
    return config


def _check_shapes(model: GgufModel, config: Mapping[str, Any]) -> None:  # Any: JSON
    """Raise CheckpointError unless the tensors have the sizes of the metadata.

    Ranks allocate memory by these sizes before they read tensors.
    """
    hidden_size, head_dim = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    experts = config.get("num_experts", config.get("num_local_experts"))
    shapes: dict[str, tuple[int, ...]] = {
        "attn_output": (hidden_size, queries),
        "ffn_down": (hidden_size, inner),
        "attn_k": (keys, hidden_size),
    }
    if experts is not None:
        shapes["ffn_down_exps"] = (experts, *shapes.pop("ffn_down"))
    if config["model_type"] == "phi3":
        shapes["attn_qkv"] = (queries + 2 * shapes.pop("attn_k")[0], hidden_size)
    expected = {"token_embd.weight": (config["vocab_size"], hidden_size)} | {
        f"blk.{layer}.{name}.weight": shape
        for layer in range(config["num_hidden_layers"])
        for name, shape in shapes.items()
    }
    for name, shape in expected.items():
        tensor = model.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{model.path}: tensor {name} is missing.")
        if tensor.shape != shape:
            raise CheckpointError(
                f"{tensor.path}: tensor {name} has shape {list(tensor.shape)}, but the metadata "
                f"requires {list(shape)}."
            )


def _is_float32(model: GgufModel) -> bool:
    return all(tensor.type.name == "F32" for tensor in model.tensors.values())


def _quantization(model: GgufModel) -> dict[str, Any]:  # Any: JSON
    layers: defaultdict[str, list[str]] = defaultdict(list)
    for layer, format in model.kept_formats().items():
        layers[format].append(layer)
    return {"quantization_config": {"quant_method": "gguf", **layers}} if layers else {}


def _token_ids(metadata: Mapping[str, Value]) -> dict[str, Any]:  # Any: JSON
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {ours: metadata.get(f"tokenizer.ggml.{key}_token_id") for ours, key in keys.items()}
    return {name: token_id for name, token_id in found.items() if token_id is not None}


def _generation_config(metadata: Mapping[str, Value]) -> dict[str, Any]:  # Any: JSON
    """Return the end-of-sequence tokens, and the recommended parameters of sampling."""
    ids = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    values: dict[str, Any] = {  # Any: JSON
        "eos_token_id": list(dict.fromkeys(token_id for token_id in ids if token_id is not None))
    }
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    for key, name in names.items():
        value = metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float):
            values[name] = value if isinstance(value, int) else float(f"{value:.7g}")
    return values


def _rope_scaling(model: GgufModel, fields: _Fields) -> dict[str, Any]:  # Any: JSON
    """Return the scaling of rotary embeddings, which is partly stored as tensors."""
    if "rope_freqs.weight" in model.tensors:
        return {"rope_scaling": _llama3_scaling(model, fields)}
    if "rope_factors_long.weight" in model.tensors:
        original = fields.integer("rope.scaling.original_context_length")
        factors = {
            f"{kind}_factor": _values(model, f"rope_factors_{kind}.weight")
            for kind in ("long", "short")
        }
        return {
            "original_max_position_embeddings": original,
            "rope_scaling": {"type": "longrope", **factors},
        }
    kind = fields.word("rope.scaling.type", "none")
    if kind == "none":
        return {}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        original = fields.integer("rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = original
    elif kind != "linear":
        raise CheckpointError(f"{model.path}: rope.scaling.type {kind!r:.60} is not supported.")
    return {"rope_scaling": scaling}


def _llama3_scaling(model: GgufModel, fields: _Fields) -> dict[str, Any]:  # Any: JSON
    """Return the parameters that give the stored factors of Llama 3.1's rotary embedding."""
    stored = np.array(_values(model, "rope_freqs.weight"))
    scaling = {
        **_LLAMA3,
        "rope_type": "llama3",
        "factor": float(f"{stored.max():.6g}"),
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }
    theta = fields.number("rope.freq_base", 10000.0)
    lengths = 2 * np.pi * theta ** (np.arange(len(stored)) / len(stored))
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = np.clip((_LLAMA3_CONTEXT / lengths - low) / (high - low), 0, 1)
    factors = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if not np.allclose(stored, factors, rtol=_TOLERANCE):
        raise CheckpointError(
            f"{model.path}: the factors in rope_freqs.weight are not those of Llama 3, and other "
            "factors are not supported."
        )
    return scaling


def _values(model: GgufModel, name: str) -> list[float]:
    tensor = model.tensors[name]
    if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_FACTORS:
        raise CheckpointError(f"{tensor.path}: tensor {name} must be a short vector of float32.")
    with tensor.path.open("rb") as file:
        file.seek(tensor.first_byte)
        values = np.frombuffer(file.read(tensor.num_bytes), "<f4")
    return [float(f"{value:.7g}") for value in values]


def _no_more(config: Mapping[str, Any], fields: _Fields) -> dict[str, Any]:  # Any: JSON
    return {}


def _gemma(config: Mapping[str, Any], fields: _Fields) -> dict[str, Any]:  # Any: JSON
    return {"hidden_activation": "gelu_pytorch_tanh"}


def _granite(config: Mapping[str, Any], fields: _Fields) -> dict[str, Any]:  # Any: JSON
    return {
        "attention_multiplier": fields.number("attention.scale", 1.0),
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
        "residual_multiplier": fields.number("residual_scale", 1.0),
        "logits_scaling": fields.number("logit_scale", 1.0),
    }


def _olmo2(config: Mapping[str, Any], fields: _Fields) -> dict[str, Any]:  # Any: JSON
    if fields.number("attention.sliding_window", 0):
        raise fields.error("attention.sliding_window", "is that of OLMo-3, which is not supported")
    return {}


def _experts(config: Mapping[str, Any], fields: _Fields) -> dict[str, Any]:  # Any: JSON
    return {
        "num_local_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
    }


def _qwen3_moe(config: Mapping[str, Any], fields: _Fields) -> dict[str, Any]:  # Any: JSON
    return {
        "num_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _phi3(config: Mapping[str, Any], fields: _Fields) -> dict[str, Any]:  # Any: JSON
    window = fields.integer("attention.sliding_window", 0)
    return {
        "sliding_window": window or None,
        "original_max_position_embeddings": fields.integer(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
    }


def _gemma2(config: Mapping[str, Any], fields: _Fields) -> dict[str, Any]:  # Any: JSON
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scale(config, num_layers_of_27b=46),
        "sliding_window": fields.integer("attention.sliding_window"),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
    }


def _gemma3(config: Mapping[str, Any], fields: _Fields) -> dict[str, Any]:  # Any: JSON
    num_layers = config["num_hidden_layers"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scale(config, num_layers_of_27b=62),
        "sliding_window": fields.integer("attention.sliding_window"),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10000.0),
        "layer_types": [
            "sliding_attention" if (index + 1) % _GLOBAL_EVERY else "full_attention"
            for index in range(num_layers)
        ],
    }


def _query_scale(config: Mapping[str, Any], *, num_layers_of_27b: int) -> int:  # Any: JSON
    """Return the scale of queries, which files do not have: only 27B's is not the head's size."""
    if config["num_hidden_layers"] == num_layers_of_27b:
        return int(config["hidden_size"]) // int(config["num_attention_heads"])
    return int(config["head_dim"])


_ARCHITECTURES: dict[str, tuple[str, str, Callable[[Mapping[str, Any], _Fields], dict[str, Any]]]]
_ARCHITECTURES = {
    "gemma": ("GemmaForCausalLM", "gemma", _gemma),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", _gemma2),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", _gemma3),
    "granite": ("GraniteForCausalLM", "granite", _granite),
    "llama": ("LlamaForCausalLM", "llama", _no_more),
    "mixtral": ("MixtralForCausalLM", "mixtral", _experts),
    "olmo2": ("Olmo2ForCausalLM", "olmo2", _olmo2),
    "phi3": ("Phi3ForCausalLM", "phi3", _phi3),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", _no_more),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", _no_more),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3", _no_more),
}
"""The architecture and model type in transformers, and further fields of config.json."""
