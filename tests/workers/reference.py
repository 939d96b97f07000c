"""Small random checkpoints made by Transformers, and both ways of running them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from attention.abstract import AttentionBatch
from attention.cpu.torch_sdpa import TorchSDPABackend
from pagedray.config import Dtype, EngineConfig
from tests.multimodal import TEXT_TYPES, multimodal_config, transformers_class
from workers.models.decoder import Decoder
from workers.models.families.registry import read_model_config
from workers.models.self_attention import attention_spec
from workers.models.step_attention import CachedAttention
from workers.weights.load_weights import load_weights

if TYPE_CHECKING:
    from pathlib import Path

    from workers.parallel.group import ParallelGroup

CPU = torch.device("cpu")
NUM_TOKENS = 23
BLOCK_SIZE = 4

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 50.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}

# Vocabularies are odd, so that two ranks must pad them.
CASES: dict[str, dict[str, Any]] = {
    "llama-6-heads-3-kv": {"model_type": "llama", "heads": 6, "kv_heads": 3},
    "llama-3-heads-1-kv-tied-linear": {
        "model_type": "llama",
        "heads": 3,
        "kv_heads": 1,
        "tie_word_embeddings": True,
        "rope_parameters": _LINEAR,
    },
    "llama-12-heads-4-kv-llama3": {
        "model_type": "llama",
        "heads": 12,
        "kv_heads": 4,
        "rope_parameters": _LLAMA3,
    },
    "llama-6-heads-2-kv-biases": {
        "model_type": "llama",
        "heads": 6,
        "kv_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama-5-heads": {"model_type": "llama", "heads": 5, "kv_heads": 5, "rms_norm_eps": 1e-2},
    "mistral-short-window": {
        "model_type": "mistral",
        "heads": 6,
        "kv_heads": 1,
        "sliding_window": 7,
    },
    "mistral-no-window-head-size": {
        "model_type": "mistral",
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 12,
        "sliding_window": None,
    },
    "qwen2-windows-on-later-layers": {
        "model_type": "qwen2",
        "heads": 12,
        "kv_heads": 2,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "qwen2-layer-types": {
        "model_type": "qwen2",
        "heads": 6,
        "kv_heads": 6,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3-wide-heads": {"model_type": "qwen3", "heads": 6, "kv_heads": 2, "head_dim": 24},
    "qwen3-biases-one-kv-head": {
        "model_type": "qwen3",
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 10,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "gemma2-capped": {
        "model_type": "gemma2",
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 10,
        "sliding_window": 6,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma2-biases-no-caps": {
        "model_type": "gemma2",
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 8,
        "attention_bias": True,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 9,
    },
    "gemma3-two-ropes": {
        "model_type": "gemma3_text",
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 10,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "final_logit_softcapping": 7.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
        },
    },
    "bloom-6-heads": {"model_type": "bloom", "heads": 6, "kv_heads": 6},
    "bloom-4-heads-untied": {
        "model_type": "bloom",
        "heads": 4,
        "kv_heads": 4,
        "tie_word_embeddings": False,
        "layer_norm_epsilon": 1e-2,
    },
    "mpt-12-heads": {"model_type": "mpt", "heads": 12, "kv_heads": 12},
    "mpt-clipped": {
        "model_type": "mpt",
        "heads": 4,
        "kv_heads": 4,
        "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.2},
    },
    "llama-yarn": {
        "model_type": "llama",
        "heads": 4,
        "kv_heads": 2,
        "rope_parameters": _YARN,
    },
    "qwen2-yarn-unrounded": {
        "model_type": "qwen2",
        "heads": 4,
        "kv_heads": 2,
        "rope_parameters": _YARN
        | {"truncate": False, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 4, "factor": 3},
    },
    "llama-dynamic": {
        "model_type": "llama",
        "heads": 4,
        "kv_heads": 2,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 300.0, "factor": 4.0},
    },
    "gemma-one-kv-head": {"model_type": "gemma", "heads": 6, "kv_heads": 1, "head_dim": 10},
    "granite-multipliers": {
        "model_type": "granite",
        "heads": 6,
        "kv_heads": 2,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.3,
        "logits_scaling": 2.5,
    },
    "granite-biases-tied": {
        "model_type": "granite",
        "heads": 4,
        "kv_heads": 1,
        "residual_multiplier": 0.5,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "olmo2-6-heads-2-kv": {"model_type": "olmo2", "heads": 6, "kv_heads": 2},
    "olmo2-one-kv-head-biases": {
        "model_type": "olmo2",
        "heads": 4,
        "kv_heads": 1,
        "attention_bias": True,
    },
    "olmo3-two-ropes": {
        "model_type": "olmo3",
        "heads": 6,
        "kv_heads": 2,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": _YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
        },
    },
    "olmo3-biases": {
        "model_type": "olmo3",
        "heads": 4,
        "kv_heads": 1,
        "attention_bias": True,
        "sliding_window": 5,
        "tie_word_embeddings": True,
    },
    "ministral3-growing-queries": {
        "model_type": "ministral3",
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 10,
        "rope_parameters": _YARN
        | {"original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.6},
    },
    "ministral3-window-tied": {
        "model_type": "ministral3",
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 8,
        "sliding_window": 6,
        "tie_word_embeddings": True,
        "rope_parameters": _YARN
        | {"original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.2, "mscale": 1.0},
    },
    "mistral3-window": {
        "model_type": "mistral3",
        "text_type": "mistral",
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 10,
        "sliding_window": 7,
    },
    "mistral3-tied-growing-queries": {
        "model_type": "mistral3",
        "text_type": "ministral3",
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "rope_parameters": _YARN
        | {"original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.6},
    },
    "gemma3-with-vision": {
        "model_type": "gemma3",
        "text_type": "gemma3_text",
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 10,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": _LINEAR,
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
        },
    },
    "qwen2_5_vl-mrope": {
        "model_type": "qwen2_5_vl",
        "text_type": "qwen2_5_vl_text",
        "heads": 6,
        "kv_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "mrope_section": [1, 1, 2]},
    },
    "qwen2_5_vl-tied-windows": {
        "model_type": "qwen2_5_vl",
        "text_type": "qwen2_5_vl_text",
        "heads": 4,
        "kv_heads": 1,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
        "rope_parameters": _YARN | {"mrope_section": [2, 1, 1]},
    },
    "qwen3_vl-interleaved-mrope": {
        "model_type": "qwen3_vl",
        "text_type": "qwen3_vl_text",
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 12,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 50.0,
            "mrope_section": [2, 2, 2],
            "mrope_interleaved": True,
        },
    },
    "qwen3_vl-biases-tied": {
        "model_type": "qwen3_vl",
        "text_type": "qwen3_vl_text",
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 8,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": _YARN | {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
    },
    "smollm3-every-other-rope": {
        "model_type": "smollm3",
        "heads": 6,
        "kv_heads": 2,
        "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 6,
    },
    "smollm3-interval": {
        "model_type": "smollm3",
        "heads": 4,
        "kv_heads": 2,
        "no_rope_layer_interval": 3,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "ministral-two-kinds": {
        "model_type": "ministral",
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 12,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "cohere2-parallel": {
        "model_type": "cohere2",
        "heads": 6,
        "kv_heads": 2,
        "sliding_window": 6,
        "logit_scale": 0.3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "cohere2-biases-untied": {
        "model_type": "cohere2",
        "heads": 4,
        "kv_heads": 1,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": _LINEAR,
    },
    "glm-half-heads": {"model_type": "glm", "heads": 6, "kv_heads": 2, "head_dim": 8},
    "glm4-four-norms": {
        "model_type": "glm4",
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 16,
        "attention_bias": False,
        "partial_rotary_factor": 0.25,
    },
    "starcoder2-window": {
        "model_type": "starcoder2",
        "heads": 6,
        "kv_heads": 2,
        "sliding_window": 7,
    },
    "starcoder2-no-biases": {
        "model_type": "starcoder2",
        "heads": 4,
        "kv_heads": 1,
        "use_bias": False,
        "tie_word_embeddings": False,
    },
    "seed-oss-biases": {
        "model_type": "seed_oss",
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 10,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    "ernie-biases": {
        "model_type": "ernie4_5",
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 10,
        "use_bias": True,
    },
    "phi3-window": {"model_type": "phi3", "heads": 6, "kv_heads": 2, "sliding_window": 7},
    "phi3-longrope-partial": {
        "model_type": "phi3",
        "heads": 4,
        "kv_heads": 1,
        "original_max_position_embeddings": 32,
        "partial_rotary_factor": 0.75,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 300.0,
            "short_factor": [1.0, 1.3, 2.0],
            "long_factor": [1.0, 3.0, 5.0],
        },
    },
}
TWO_RANK_CASES = [
    name
    for name, case in CASES.items()
    if case["heads"] % 2 == 0 and (case["kv_heads"] % 2 == 0 or case["kv_heads"] == 1)
]


def save_checkpoint(name: str, folder: Path, **saving: Any) -> None:
    """Save the random model of a case."""
    case = dict(CASES[name])
    heads, kv_heads = case.pop("heads"), case.pop("kv_heads")
    model_type = case.pop("model_type")
    # Families with ALiBi have none of these.
    if model_type not in ("bloom", "mpt"):
        case["intermediate_size"] = 84
        case["num_key_value_heads"] = kv_heads
        case["max_position_embeddings"] = 64
    case |= {
        "vocab_size": 131,
        "hidden_size": heads * 8,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        # The defaults of some families exceed this small vocabulary.
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if model_type in TEXT_TYPES:
        is_tied = case.pop("tie_word_embeddings", False)
        text = case | {"model_type": case.pop("text_type")}
        config = multimodal_config(model_type, text, is_tied=is_tied)
        auto_class: Any = AutoModelForImageTextToText  # Any: transformers has no types
    else:
        config, auto_class = AutoConfig.for_model(model_type, **case), AutoModelForCausalLM
    torch.manual_seed(len(name))
    model = auto_class.from_config(config)
    with torch.no_grad():
        # Transformers starts norms at one and biases at zero, which would hide a mistake.
        for parameter in model.parameters():
            is_matrix = parameter.dim() == 2
            deviation = 1.5 / math.sqrt(parameter.shape[-1]) if is_matrix else 0.3
            parameter.normal_(0.0 if is_matrix else 0.7, deviation)
    model.save_pretrained(folder, **saving)


def token_ids() -> torch.Tensor:
    """Return the tokens that every case is run with."""
    return torch.randint(0, 131, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))


def reference_logits(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return what Transformers computes, `[num_tokens, vocab_size]`."""
    model = transformers_class(folder).from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    with torch.inference_mode():
        logits: torch.Tensor = model(token_ids()[None]).logits[0]
    return logits.float()


def loaded_model(folder: Path, group: ParallelGroup, dtype: Dtype = "float32") -> Decoder:
    """Return this rank's part of a checkpoint, ready to run."""
    config = read_model_config(folder, dtype=dtype)
    model = Decoder(config, group, backend=TorchSDPABackend, device=CPU)
    load_weights(model, EngineConfig(model=config))
    return model


@torch.inference_mode()
def run(
    model: Decoder,
    group: ParallelGroup,
    steps: tuple[int, ...] = (NUM_TOKENS,),
    logits_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the logits of the last step, after steps of these numbers of tokens."""
    config = model.config
    spec = attention_spec(config, group, block_size=BLOCK_SIZE, device=CPU)
    builder = TorchSDPABackend.make_metadata_builder(spec)
    cache = torch.zeros(
        TorchSDPABackend.get_kv_cache_shape(
            num_blocks=9,
            num_layers=config.num_layers,
            block_size=BLOCK_SIZE,
            num_kv_heads=spec.layers[0].num_kv_heads,
            head_size=config.head_size,
        ),
        dtype=model.dtype,
    )
    table = np.array([[5, 2, 7, 1, 3, 8]], dtype=np.int32)
    ids, first = token_ids(), 0
    for size in steps:
        positions = np.arange(first, first + size)
        batch = AttentionBatch(
            num_prefills=int(size > 1),
            query_lens=np.array([size], dtype=np.int32),
            seq_lens=np.array([first + size], dtype=np.int32),
            block_tables=table,
            slot_mapping=table[0][positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
            + positions % BLOCK_SIZE,
        )
        hidden = model.forward(
            ids[first : first + size],
            torch.from_numpy(positions),
            CachedAttention(cache, builder.build(batch)),
            logits_indices,
        )
        first += size
    return model.logits(hidden).whole()
