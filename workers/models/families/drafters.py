"""Drafters: heads in the formats of EAGLE-3 and speculators, MTP layers, and draft models."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.errors import CheckpointError, StartupError
from pagedray.files import has_file, has_folder
from pagedray.model_config import DraftHeadConfig, ModelConfig, TensorNames, TextTensors
from workers.models.config_json.config_file import ConfigFile
from workers.models.config_json.family import MAX_LAYERS, MAX_VOCAB
from workers.models.config_json.score_section import load_tokenizer
from workers.models.families.llama import LLAMA
from workers.models.families.qwen import QWEN3
from workers.models.families.registry import read_model_config
from workers.weights.tensor_entries import read_entries

if TYPE_CHECKING:
    from pathlib import Path

    from workers.models.config_json.family import Family

__all__ = ["draft_head_method", "mtp_head", "read_draft_head", "read_draft_model"]

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
_LAYERS = {"llama": LLAMA, "qwen3": QWEN3}
_MAX_DRAFTS = 64
_NAMES = TensorNames(
    embedding="embed_tokens",
    decoder_layer="layers.{}",
    final_norm="norm",
    mlp_norm="post_attention_layernorm",
)
_TENSORS = TextTensors(
    prefixes=(("midlayer.", "layers.0."),), skipped=("t2d", "verifier_lm_head.", "verifier_norm.")
)
_FORMATS = "EAGLE-3 checkpoints in the original format and in that of speculators"


def draft_head_method(folder: Path) -> str | None:
    """Return the method of speculation that a checkpoint is for, or None for a language model.

    Raises CheckpointError.
    """
    file = _config_file(folder)
    given = file.value("speculators_model_type")
    if isinstance(given, str):
        return given
    is_head = any("eagle3" in name.lower() for name in file.words("architectures"))
    return "eagle3" if is_head else None


def read_draft_head(
    folder: Path, target: ModelConfig, *, reads_tensors: bool = True
) -> DraftHeadConfig:
    """Return the configuration of the draft head in a folder, for a target.

    Without `reads_tensors`, the checkpoint is assumed to have neither an embedding nor more than
    the necessary tensors. Raises CheckpointError if the head does not fit the target.
    """
    file = _config_file(folder)
    method = draft_head_method(folder)
    if method != "eagle3":
        found = ", ".join(file.words("architectures")) if method is None else method
        raise CheckpointError(
            f"{file.path}: {found or 'the model'} is not a draft head that is supported; use "
            f"{_FORMATS}."
        )
    section, family = _layer_section(file)
    for key in ("parallel_drafting", "quantization_config"):
        if file.value(key):
            raise file.rejection(key, f"is not supported; use {_FORMATS}, without it")
    layer = _read_layer(section, family, target)
    options = file.section("eagle_config")
    source = file if "eagle_aux_hidden_state_layer_ids" in file else options
    tapped = source.indices("eagle_aux_hidden_state_layer_ids", most=MAX_LAYERS)
    number = target.num_layers
    tapped = tapped or (2, number // 2, number - 3)
    draft_vocab_size = file.integer("draft_vocab_size", layer.vocab_size, most=MAX_VOCAB)
    _check_target(file, layer, tapped, target, draft_vocab_size=draft_vocab_size)
    tensors = set(read_entries(folder)) if reads_tensors else set()
    return DraftHeadConfig(
        layer=layer,
        draft_vocab_size=draft_vocab_size,
        tapped_layers=tapped,
        norms_all_taps=_flag(file, options, "norm_before_fc"),
        norms_each_tap=_flag(file, options, "fc_norm"),
        norms_residual=_flag(file, options, "norm_before_residual"),
        norms_output=_flag(file, options, "norm_output"),
        has_embedding="embed_tokens.weight" in tensors,
        has_token_map="d2t" in tensors or draft_vocab_size < layer.vocab_size,
        num_drafts=_num_drafts(file),
    )


def mtp_head(target: ModelConfig) -> DraftHeadConfig:
    """Return the configuration of the MTP layer of a model. Raises StartupError without one."""
    mtp = target.mtp
    if mtp is None:
        raise StartupError(
            f"{target.name} has no layer of multi-token prediction; use the method ngram, or "
            "eagle3 with a draft head."
        )
    _check_shapes(target)
    prefixes = () if target.text_tensors is None else target.text_tensors.prefixes
    experts, stacked = target.experts, target.stacked_names
    layer = replace(
        target,
        num_layers=1,
        names=replace(target.names, decoder_layer=mtp.decoder_layer),
        stacked_names=stacked and replace(stacked, decoder_layer=mtp.decoder_layer),
        # All other tensors belong to the target.
        text_tensors=TextTensors(prefixes, ("",)),
        recurrent=None,
        experts=experts and replace(experts, dense_layers=()),
        sliding_windows=(),
        rotated_layers=(),
    )
    return DraftHeadConfig(
        layer=layer,
        draft_vocab_size=target.vocab_size,
        tapped_layers=(target.num_layers,),
        mtp=mtp,
        norms_output=True,
        has_token_map=False,
    )


def read_draft_model(folder: Path, target: ModelConfig) -> ModelConfig:
    """Return the configuration of the draft model in a folder, for a target.

    The longest context that it was trained with is no limit. Raises CheckpointError if the model
    does not fit the target.
    """
    model = read_model_config(folder, dtype=target.dtype, task="generate")
    model = model.with_context(target.max_positions)
    windows = [window for window in model.sliding_windows if window is not None]
    num_shapes = len({model.heads_of(layer) for layer in range(model.num_layers)})
    for is_found, what in (
        (model.has_states, "recurrent layers"),
        (min(windows, default=target.max_positions) < target.max_positions, "sliding windows"),
        (num_shapes > 1, "layers of several shapes"),
        (model.alibi_slopes is not None, "ALiBi"),
        (model.has_sinks, "attention sinks"),
    ):
        if is_found:
            raise CheckpointError(
                f"{folder}: a draft model with {what} is not supported; use a model whose layers "
                "all have plain attention to all tokens."
            )
    _check_vocabulary(model, target)
    return replace(model, max_positions=target.max_positions, long_context=None)


def _check_vocabulary(model: ModelConfig, target: ModelConfig) -> None:
    """Raise CheckpointError unless token ids of a draft model and its target are the same."""
    paths = [one.folder / "tokenizer.json" for one in (model, target)]
    if not all(map(has_file, paths)):
        if model.vocab_size != target.vocab_size:
            raise CheckpointError(
                f"{model.folder}: the draft model has a vocabulary of {model.vocab_size}, but "
                f"{target.name} has {target.vocab_size}; use a draft model with its tokenizer."
            )
        return
    if paths[0].read_bytes() == paths[1].read_bytes():
        return
    # A tokenizer may have more special tokens, and a vocabulary may be padded.
    tokens, wanted = (
        {i: token for token, i in load_tokenizer(path).get_vocab().items()} for path in paths
    )
    common = tokens.keys() & wanted.keys()
    num_others = sum(tokens[i] != wanted[i] for i in common)
    if num_others:
        raise CheckpointError(
            f"{paths[0]}: {num_others} of {len(common)} token ids stand for other tokens than in "
            f"{target.name}; use a draft model with its tokenizer."
        )


def _config_file(folder: Path) -> ConfigFile:
    path = folder / "config.json"
    if not has_folder(folder):
        raise CheckpointError(
            f"{folder} is not a folder; a draft head or model is a folder with config.json and "
            "weights."
        )
    if not has_file(path):
        raise CheckpointError(f"No config.json found in {folder}.")
    return ConfigFile.read(path)


def _layer_section(file: ConfigFile) -> tuple[ConfigFile, Family]:
    """Return the fields of the layer, and its family."""
    key = "transformer_layer_config"
    section = file.section(key) if key in file else file
    kind = section.choice("model_type", _LAYERS, "llama")
    return section, _LAYERS[kind]


def _read_layer(section: ConfigFile, family: Family, target: ModelConfig) -> ModelConfig:
    """Return the layer of a head. The longest context that it was trained with is no limit."""
    layer = family.read(section)
    if layer.num_layers != 1:
        raise section.rejection("num_hidden_layers", f"must be 1, not {layer.num_layers}")
    if any(layer.sliding_windows) or "sliding_attention" in section.words("layer_types"):
        raise section.rejection("layer_types", "must be full_attention for a draft head")
    return replace(
        layer,
        names=_NAMES,
        text_tensors=_TENSORS,
        task="generate",
        max_positions=target.max_positions,
        has_tied_embeddings=False,
        long_context=None,
        dtype=target.dtype,
    )


def _check_target(
    file: ConfigFile,
    layer: ModelConfig,
    tapped: tuple[int, ...],
    target: ModelConfig,
    *,
    draft_vocab_size: int,
) -> None:
    """Raise CheckpointError unless a head fits its target."""
    states = file.value("target_hidden_size") or layer.hidden_size
    num_kv_heads, head_size = _check_shapes(target)
    for name, found, wanted in (
        ("a vocabulary of", layer.vocab_size, target.vocab_size),
        ("a hidden size of", layer.hidden_size, target.hidden_size),
        ("a target_hidden_size of", states, target.hidden_size),
        ("a number of KV heads of", layer.num_kv_heads, num_kv_heads),
        ("a head size of", layer.head_size, head_size),
    ):
        if found != wanted:
            raise CheckpointError(
                f"{file.path}: the draft head has {name} {found}, but {target.name} has {wanted}; "
                "use a head that was trained for the model."
            )
    if max(tapped) >= target.num_layers or min(tapped) < 0:
        raise CheckpointError(
            f"{file.path}: the draft head reads the input of layer {max(tapped)}, but "
            f"{target.name} has {target.num_layers} layers; use a head that was trained for the "
            "model."
        )
    if draft_vocab_size > layer.vocab_size:
        raise file.rejection(
            "draft_vocab_size", f"must be at most {layer.vocab_size}, not {draft_vocab_size}"
        )


def _check_shapes(target: ModelConfig) -> tuple[int, int]:
    """Return the number and the size of KV heads, which must be the same in all layers."""
    heads = {
        (one.num_kv_heads, one.head_size) for one in map(target.heads_of, target.cached_layers)
    }
    if len(heads) != 1:
        raise StartupError(
            f"{target.name} has layers of several shapes, which a draft head cannot share blocks "
            "with; use the method ngram."
        )
    ((num_kv_heads, head_size),) = heads
    return num_kv_heads, head_size


def _flag(file: ConfigFile, options: ConfigFile, key: str) -> bool:
    return options.flag(key, False) if key in options else file.flag(key, False)


def _num_drafts(file: ConfigFile) -> int | None:
    methods = file.section("speculators_config").value("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    number = first.get("speculative_tokens") if isinstance(first, dict) else None
    return number if isinstance(number, int) and 1 <= number <= _MAX_DRAFTS else None
