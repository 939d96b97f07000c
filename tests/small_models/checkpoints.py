"""Small random checkpoints of every family, made by transformers."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.small_models.multimodal import multimodal_config, transformers_class

VOCAB_SIZE = 131


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration of one family."""

    name: str
    family: str
    num_heads: int = 6
    num_kv_heads: int = 2
    hidden_size: int = 48
    has_tied_embeddings: bool = False
    # A small scale makes the model repeat its input less often.
    embedding_scale: float = 1.0
    # With a `model_type`, that of the text, the family is multimodal.
    # Any: transformers' configurations take numbers, strings, lists and dictionaries.
    more: dict[str, Any] = field(default_factory=dict)


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}
# For three pairs, since three quarters of each head rotate.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.3, 2.0],
    "long_factor": [1.0, 3.0, 5.0],
}
CASES = (
    Case(
        name="llama-mqa",
        family="Llama",
        num_kv_heads=1,
        has_tied_embeddings=True,
    ),
    Case(
        name="llama-llama3-rope",
        family="Llama",
        num_heads=12,
        hidden_size=96,
        more={"rope_parameters": LLAMA3_ROPE},
    ),
    Case(
        name="llama-linear-rope",
        family="Llama",
        num_heads=10,
        hidden_size=80,
        more={"rope_parameters": LINEAR_ROPE, "head_dim": 16},
    ),
    Case(
        name="mistral-window",
        family="Mistral",
        more={"sliding_window": 11},
    ),
    Case(
        name="qwen2-tied",
        family="Qwen2",
        num_heads=14,
        hidden_size=112,
        has_tied_embeddings=True,
    ),
    Case(
        name="qwen3-wide-heads",
        family="Qwen3",
        hidden_size=60,
        more={"head_dim": 16},
    ),
    Case(
        name="gemma2-window-of-blocks",
        family="Gemma2",
        hidden_size=60,
        has_tied_embeddings=True,
        embedding_scale=0.1,
        more={
            "head_dim": 16,
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 20.0,
        },
    ),
    Case(
        name="gemma3-two-ropes",
        family="Gemma3",
        num_heads=4,
        num_kv_heads=1,
        has_tied_embeddings=True,
        embedding_scale=0.1,
        more={
            "head_dim": 8,
            "sliding_window": 9,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 8,
            "rope_parameters": {
                "full_attention": LINEAR_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    Case(
        name="bloom-6-heads",
        family="Bloom",
        num_kv_heads=6,
        has_tied_embeddings=True,
        embedding_scale=0.1,
    ),
    Case(
        name="mpt-clipped",
        family="Mpt",
        num_heads=4,
        num_kv_heads=4,
        hidden_size=32,
        has_tied_embeddings=True,
        embedding_scale=0.2,
        more={"attn_config": {"clip_qkv": 2.0, "softmax_scale": 0.3}},
    ),
    Case(
        name="phi3-longrope-window",
        family="Phi3",
        more={
            "sliding_window": 17,
            "original_max_position_embeddings": 128,
            "rope_parameters": LONGROPE,
        },
    ),
)
MULTIMODAL_TYPES = {
    "Gemma3": "gemma3",
    "Gemma4": "gemma4",
    "Gemma4Unified": "gemma4_unified",
    "Mistral3": "mistral3",
    "Qwen3_5": "qwen3_5",
    "Qwen3_5Moe": "qwen3_5_moe",
    "Qwen2_5_VL": "qwen2_5_vl",
    "Qwen3VL": "qwen3_vl",
}
CONFIG_CLASSES = {
    "Gemma3": "Gemma3TextConfig",
    "Gemma4": "Gemma4TextConfig",
    "Gemma4Unified": "Gemma4UnifiedTextConfig",
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
}


def class_name(case: Case) -> str:
    """Return the name of a model in transformers, and in `architectures` of config.json."""
    suffix = "ForConditionalGeneration" if "model_type" in case.more else "ForCausalLM"
    return f"{case.family}{suffix}"


def save_checkpoint(case: Case, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Write a random checkpoint whose greedy continuations do not settle on one token."""
    torch.manual_seed(sum(map(ord, case.name)))
    config_class = CONFIG_CLASSES.get(case.family, f"{case.family}Config")
    shape = {
        "hidden_size": case.hidden_size,
        "num_hidden_layers": 3,
        "num_attention_heads": case.num_heads,
        "vocab_size": VOCAB_SIZE,
        "tie_word_embeddings": case.has_tied_embeddings,
        # With the usual 0.02 such a small model would be nearly constant.
        "initializer_range": 0.25,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if case.family == "Mpt":
        shape["max_seq_len"] = 256
    elif case.family != "Bloom":
        shape["num_key_value_heads"] = case.num_kv_heads
        shape["intermediate_size"] = 2 * case.hidden_size
        shape["max_position_embeddings"] = 256
    if "model_type" in case.more:
        config = multimodal_config(
            MULTIMODAL_TYPES[case.family], shape | case.more, is_tied=case.has_tied_embeddings
        )
    else:
        config = getattr(transformers, config_class)(**shape | case.more)
    model = getattr(transformers, class_name(case))(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                # Norms start at one and biases at zero, which would hide a mistake.
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            if case.family == "NemotronH" and name.endswith("dt_bias"):
                # Transformers clamps small step sizes, in chunks of prompts alone.
                parameter.clamp_(min=2.0)
            if "embed" in name or "wte" in name:
                parameter.mul_(case.embedding_scale)
    model.to(dtype).save_pretrained(folder)
    save_word_tokenizer(folder, VOCAB_SIZE)


def save_word_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer whose words are `w0`, `w1`, ...: a checkpoint needs one."""
    words = {f"w{index}": index for index in range(vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def greedy_continuations(
    folder: Path, prompts: list[list[int]], num_tokens: int
) -> list[tuple[list[int], list[float]]]:
    """Return transformers' greedy tokens for each prompt and their logprobs, in float32."""
    # Its other attention implementations ignore soft caps in some versions.
    model = (
        transformers_class(folder)
        .from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )
    continuations = []
    with torch.inference_mode():
        for prompt in prompts:
            tokens = torch.tensor([prompt])
            output = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
            chosen = output.sequences[0, len(prompt) :]
            logprobs = torch.cat(output.logits).float().log_softmax(1)
            of_chosen = logprobs.gather(1, chosen[:, None]).squeeze(1)
            continuations.append((chosen.tolist(), of_chosen.tolist()))
    return continuations
