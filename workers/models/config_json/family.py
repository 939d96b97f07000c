"""The keys of `config.json` that most decoders share.

Each family is one module. It reads its own keys and leaves the others to `base_config`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from pagedray.model_config import (
    Activation,
    Dtype,
    ExpertsConfig,
    ModelConfig,
    RecurrentConfig,
    TensorNames,
)
from workers.models.config_json.config_file import MISSING, ConfigFile

__all__ = [
    "MAX_EXPERTS",
    "MAX_FACTOR",
    "MAX_HEADS",
    "MAX_HEAD_SIZE",
    "MAX_LAYERS",
    "MAX_POSITIONS",
    "MAX_RECURRENT_WIDTH",
    "MAX_SIZE",
    "MAX_THETA",
    "MAX_VOCAB",
    "STACKED_NAMES",
    "Family",
    "base_config",
    "check_causal",
    "check_step_limits",
    "eos_token_ids",
    "experts_of",
    "has_window_by_layer",
    "model_dtype",
    "qwen_windows",
    "recurrent_layers",
    "scored_experts",
    "selective_scans",
    "windows_by_layer_type",
]

_FP8 = "float8_e4m3fn"
# The key and the names of each activation.
_ACTIVATIONS: dict[Activation, tuple[str, tuple[str, ...]]] = {
    "silu": ("hidden_act", ("silu", "swish")),
    "gelu_tanh": ("hidden_activation", ("gelu_pytorch_tanh",)),
}
_KINDS = ("sliding_attention", "full_attention")
MAX_EXPERTS = 2**12
STACKED_NAMES = TensorNames(
    expert_input=("mlp.experts.gate_up_proj",), expert_output="mlp.experts.down_proj"
)
"""Names of transformers' own modules."""
_SUM_EPS = 1e-20
# Transformers takes one name for the other.
_NUM_KEYS = ("num_experts", "num_local_experts")
# As transformers 4 and 5 write the second number.
_NO_LIMITS = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])

MAX_SIZE = 2**20
"""Columns of a weight."""
MAX_VOCAB = 2**24
MAX_LAYERS = 1024
MAX_RECURRENT_WIDTH = 4
"""Tokens that the convolution of a recurrent layer reads."""
MAX_HEADS = 2**14
MAX_HEAD_SIZE = 1024
MAX_POSITIONS = 2**26
MAX_THETA = 1e12
"""Base of the rope."""
MAX_FACTOR = 1e6
"""Maximum of factors of the rope's positions and of a layer's values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family: the checkpoints of one architecture."""

    architecture: str
    """Its name in `architectures` of config.json."""
    model_types: tuple[str, ...]
    """Its names in `model_type` of config.json."""
    reader: Callable[[ConfigFile], ModelConfig]
    aliases: tuple[str, ...] = ()
    """Other names of the same architecture."""
    reads_quantization: bool = False
    """Whether it reads `quantization_config` itself."""

    def read(self, file: ConfigFile) -> ModelConfig:
        """Return the configuration of a checkpoint. Raises CheckpointError."""
        return replace(self.reader(file), architecture=self.architecture)


def base_config(
    file: ConfigFile,
    *,
    activation: Activation = "silu",
    activation_key: str | None = None,
    num_layers: int | None = None,
    default_num_kv_heads: int | None = None,
    default_head_size: int | None = None,
    intermediate_key: str = "intermediate_size",
    default_intermediate_size: int | None = None,
    norm_eps_key: str = "rms_norm_eps",
    default_norm_eps: float = 1e-6,
    is_tied_by_default: bool = False,
) -> ModelConfig:
    """Return a configuration of the keys that most families share.

    Defaults stand for missing keys, and `num_layers` for that of the file. The rope is left to the
    family.
    """
    check_causal(file)
    key, words = _ACTIVATIONS[activation]
    file.choice(activation_key or key, words, words[0])
    # Families with one of these keys ignore the other, as in transformers.
    file.note_read(*(name for name, _ in _ACTIVATIONS.values()))
    hidden_size = file.integer("hidden_size", most=MAX_SIZE)
    num_heads = file.integer("num_attention_heads", most=MAX_HEADS)
    num_kv_heads = file.integer(
        "num_key_value_heads", default_num_kv_heads or num_heads, most=MAX_HEADS
    )
    if num_heads % num_kv_heads:
        raise file.rejection(
            "num_attention_heads",
            f"must be a multiple of num_key_value_heads {num_kv_heads}, not {num_heads}",
        )
    vocab_size = file.integer("vocab_size", most=MAX_VOCAB)
    return ModelConfig(
        name=file.path.resolve().parent.name,
        folder=file.path.parent,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=file.integer(
            intermediate_key, default_intermediate_size or MISSING, most=MAX_SIZE
        ),
        num_layers=num_layers or file.integer("num_hidden_layers", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=_head_size(file, hidden_size, num_heads, default_head_size),
        max_positions=file.integer("max_position_embeddings", most=MAX_POSITIONS),
        norm_eps=file.number(norm_eps_key, default_norm_eps, most=1.0),
        activation=activation,
        has_tied_embeddings=file.flag("tie_word_embeddings", is_tied_by_default),
        eos_token_ids=eos_token_ids(file, vocab_size),
    )


def check_causal(file: ConfigFile) -> None:
    """Raise CheckpointError for a decoder with tokens that attend to later tokens."""
    if file.has_null("is_causal") or not file.flag("is_causal", True):
        raise file.rejection("is_causal", "must be true, since an encoder cannot generate")


def eos_token_ids(file: ConfigFile, vocab_size: int) -> tuple[int, ...]:
    """Return the EOS ids that the vocabulary has."""
    return tuple(token_id for token_id in file.token_ids("eos_token_id") if token_id < vocab_size)


def model_dtype(file: ConfigFile) -> Dtype | None:
    """Return the dtype of weights and activations that a file names, or None."""
    # Transformers 5 writes dtype, 4 torch_dtype.
    key = file.first_of("dtype", "torch_dtype")
    # The dtype of quantized weights; the dtype of the computation is not stated.
    is_weight_dtype = file.value(key) == _FP8 and "quantization_config" in file
    if key not in file or is_weight_dtype:
        return None
    allowed: tuple[Dtype, ...] = get_args(Dtype)
    words = [word for name in allowed for word in (name, f"torch.{name}")]
    given = file.choice(key, words).removeprefix("torch.")
    return next(name for name in allowed if name == given)


def _head_size(file: ConfigFile, hidden_size: int, num_heads: int, default: int | None) -> int:
    if "head_dim" not in file and default is None and hidden_size % num_heads:
        raise file.rejection(
            "hidden_size",
            f"must be a multiple of num_attention_heads {num_heads}, not {hidden_size}",
        )
    size = file.integer("head_dim", default or hidden_size // num_heads, most=MAX_HEAD_SIZE)
    if size % 2:
        raise file.rejection("head_dim", f"must be even, not {size}")
    return size


def windows_by_layer_type(
    file: ConfigFile, *, default_window: int, has_window_by_default: Sequence[bool]
) -> tuple[int | None, ...]:
    """Return each layer's window by `layer_types`, or by the default if that is missing."""
    has_window = has_window_by_layer(file, len(has_window_by_default)) or has_window_by_default
    if file.has_null("sliding_window") and any(has_window):
        raise file.rejection(
            "sliding_window", "must be an integer, since some layers use sliding attention"
        )
    window = file.integer("sliding_window", default_window, most=MAX_POSITIONS)
    return tuple(window if has else None for has in has_window)


def qwen_windows(
    file: ConfigFile, num_layers: int, *, default_first: int = 28
) -> tuple[int | None, ...]:
    """Return Qwen's windows, which `use_sliding_window` enables; empty without windows.

    `default_first` is the default of the first layer with a window.
    """
    file.note_read("sliding_window", "max_window_layers", "layer_types")
    if not file.flag("use_sliding_window", False):
        return ()
    if file.has_null("sliding_window"):
        return ()
    window = file.integer("sliding_window", 4096, most=MAX_POSITIONS)
    first = file.integer("max_window_layers", default_first, least=0, most=MAX_LAYERS)
    later = [layer >= first for layer in range(num_layers)]
    return tuple(window if has else None for has in has_window_by_layer(file, num_layers) or later)


def has_window_by_layer(file: ConfigFile, num_layers: int) -> list[bool]:
    """Return whether each layer has a window; empty if `layer_types` is missing."""
    kinds = file.words("layer_types")
    if kinds and len(kinds) != num_layers:
        raise file.rejection("layer_types", f"must have {num_layers} entries, not {len(kinds)}")
    for kind in kinds:
        if kind not in _KINDS:
            raise file.rejection(
                "layer_types", f"may contain only {' and '.join(_KINDS)}, not {kind[:40]!r}"
            )
    return [kind == "sliding_attention" for kind in kinds]


def recurrent_layers(
    file: ConfigFile,
    num_layers: int,
    *kinds: str,
    by_default: Sequence[bool],
    attention: Sequence[str] = ("full_attention",),
    key: str = "layer_types",
) -> tuple[int, ...]:
    """Return the layers of these kinds in the list `key`, in which all others have attention.

    `by_default` says whether each layer is of such a kind if the list is missing.
    """
    given = file.words(key)
    if given and len(given) != num_layers:
        raise file.rejection(key, f"must have {num_layers} entries, not {len(given)}")
    for layer, kind in enumerate(given):
        if kind not in (*kinds, *attention):
            raise file.rejection(
                key,
                f"has {kind[:40]!r} for layer {layer}, which is not supported; use "
                f"{' or '.join((*kinds, *attention))}",
            )
    are_recurrent = [kind in kinds for kind in given] or by_default
    return tuple(layer for layer, is_recurrent in enumerate(are_recurrent) if is_recurrent)


def selective_scans(file: ConfigFile, layers: tuple[int, ...], size: int) -> RecurrentConfig:
    """Return the selective scans of these layers, which have `size` inputs."""
    check_step_limits(file)
    # How many tokens transformers computes at once.
    file.note_read("mamba_chunk_size")
    num_heads = file.integer("mamba_n_heads", 128, most=MAX_HEADS)
    if file.value("mamba_d_head") in (None, "auto"):
        head_size = size // num_heads
    else:
        head_size = file.integer("mamba_d_head", most=MAX_HEAD_SIZE)
    if num_heads * head_size != size:
        raise file.rejection(
            "mamba_n_heads", f"times the size of a head must be {size}, not {num_heads * head_size}"
        )
    num_groups = file.integer("mamba_n_groups", 1, most=MAX_HEADS)
    if num_heads % num_groups:
        raise file.rejection(
            "mamba_n_groups", f"must be a divisor of mamba_n_heads {num_heads}, not {num_groups}"
        )
    has_bias = file.flag("mamba_proj_bias", False)
    return RecurrentConfig(
        kind="mamba2",
        layers=layers,
        conv_width=file.integer("mamba_d_conv", 4, least=2, most=MAX_RECURRENT_WIDTH),
        has_conv_bias=file.flag("mamba_conv_bias", True),
        has_bias=has_bias,
        has_output_bias=has_bias,
        num_key_heads=num_groups,
        num_value_heads=num_heads,
        key_size=file.integer("mamba_d_state", 256, most=MAX_HEAD_SIZE),
        value_size=head_size,
    )


def check_step_limits(file: ConfigFile) -> None:
    """Raise CheckpointError for limits of the step sizes of selective scans."""
    if file.value("time_step_limit") not in _NO_LIMITS:
        raise file.rejection("time_step_limit", "must be [0.0, Infinity]")


def scored_experts(
    file: ConfigFile,
    *,
    num_experts: int,
    default_num_chosen: int,
    intermediate_size: int,
    shared_size: int,
) -> ExpertsConfig:
    """Return experts that sigmoid scores choose, in groups, and an MLP beside them."""
    num_groups = file.integer("n_group", 1, most=num_experts)
    if num_experts % num_groups or num_experts // num_groups < 2 <= num_groups:
        raise file.rejection("n_group", f"must divide n_routed_experts {num_experts}")
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=file.integer("num_experts_per_tok", default_num_chosen, most=num_experts),
        intermediate_size=intermediate_size,
        is_renormalized=file.flag("norm_topk_prob", True),
        shared_size=shared_size,
        has_sigmoid_scores=True,
        has_choice_bias=True,
        has_exact_router=True,
        num_groups=num_groups,
        num_chosen_groups=file.integer("topk_group", 1, most=num_groups),
        weight_scale=file.number("routed_scaling_factor", 1.0, most=MAX_FACTOR),
        sum_eps=_SUM_EPS,
    )


def experts_of(
    file: ConfigFile,
    *,
    default_num: int,
    default_num_chosen: int,
    intermediate_size: int,
    is_renormalized: bool,
) -> ExpertsConfig:
    """Return the experts of all layers; defaults stand for missing keys."""
    given = [key for key in _NUM_KEYS if key in file]
    num_experts = file.integer(given[0] if given else _NUM_KEYS[0], default_num, most=MAX_EXPERTS)
    if len(given) == len(_NUM_KEYS) and file.value(given[1]) != num_experts:
        raise file.rejection(given[1], f"must be equal to {given[0]} {num_experts}")
    num_chosen = file.integer("num_experts_per_tok", default_num_chosen, most=num_experts)
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=intermediate_size,
        is_renormalized=is_renormalized,
    )
