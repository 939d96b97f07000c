"""Fields of config.json that no family reads, each with the reason why it changes no output.

A field that is neither read nor listed here could change the result, so it is rejected by name.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from workers.models.config_json.config_file import ConfigFile

__all__ = ["IGNORED_FIELDS", "check_all_read", "reason_to_ignore"]

_TRAINING = "training only"
_GENERATION = "a default for text generation, which requests set themselves"
_OUTPUT = "selects what transformers returns besides logits"
_TASK = "a task other than text"
_SPECIAL = "a token id that text generation does not need"
_SPEED = "affects how the model is computed, not the result"
_RECORD = "a record of how the checkpoint was made"
_BY_REASON = {
    _TRAINING: (
        *("initializer_range", "init_config", "init_device", "gradient_checkpointing", "verbose"),
        *("initializer_factor", "init_std", "layerdrop", "router_aux_loss_coef", "z_loss_weight"),
        *("moe_z_loss", "use_cut_cross_entropy", "loss_type", "label_smoothing"),
        *("router_jitter_noise",),
    ),
    _GENERATION: (
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "temperature"),
        *("top_k", "top_p", "typical_p", "min_p", "repetition_penalty", "length_penalty"),
        *("num_beam_groups", "diversity_penalty", "no_repeat_ngram_size", "bad_words_ids"),
        *("encoder_no_repeat_ngram_size", "num_return_sequences", "output_scores"),
        *("return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id"),
        *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
        *("begin_suppress_tokens", "cache_implementation", "max_new_tokens", "use_cache"),
        *("epsilon_cutoff", "eta_cutoff", "encoder_repetition_penalty", "use_mtp"),
        *("assistant_confidence_threshold", "assistant_lookbehind", "num_assistant_tokens"),
        *("num_assistant_tokens_schedule", "target_lookbehind"),
    ),
    _OUTPUT: (
        *("output_hidden_states", "output_attentions", "return_dict", "torchscript"),
        *("tie_last_hidden_states", "chunk_size_feed_forward", "output_past"),
        *("output_router_logits",),
    ),
    _TASK: (
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task"),
        *("task_specific_params", "classifier_dropout", "summary_type", "tie_encoder_decoder"),
        *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_type"),
        *("pooler_num_fc_layers", "pooler_size_per_head", "matryoshka_dimensions"),
    ),
    _SPECIAL: (
        *("bos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id"),
        *("unk_token_id", "decoder_start_token_id"),
    ),
    _SPEED: (
        *("pretraining_tp", "slow_but_exact", "use_bfloat16", "attn_implementation"),
        *("experts_implementation", "attn_impl", "fused_qkv", "masked_softmax_fusion"),
        *("bias_dropout_fusion", "skip_bias_add", "skip_bias_add_qkv", "use_flash_attn"),
        *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "fc_type"),
        *("use_parallel_embedding", "transformers.js_config", "layer_switch", "world_size"),
        *("use_flash_attention", "offset_alibi", "scale_attn_weights"),
    ),
    _RECORD: (
        *("transformers_version", "name_or_path", "model_name", "tokenizer_class", "prefix"),
        *("unsloth_version", "unsloth_fixed", "is_llama_config", "max_sequence_length"),
        *("model_max_length", "training_args", "language", "tokenizer_name", "model_version"),
        *("version", "export_model_type"),
    ),
}
IGNORED_FIELDS: Mapping[str, str] = MappingProxyType(
    {field: reason for reason, fields in _BY_REASON.items() for field in fields}
)
"""The reason to ignore each field, at the top level or in a section."""
_OF_WINDOWS = ("sliding_window", "max_window_layers")
_DROPOUT_SUFFIXES = ("dropout", "dropout_prob", "pdrop", "drop_prob")


def reason_to_ignore(field: str) -> str | None:
    """Return why a field changes no output, or None if it may change it."""
    if field.startswith("_"):
        return "private to the library that wrote it"
    if field.endswith(_DROPOUT_SUFFIXES):
        return _TRAINING
    return IGNORED_FIELDS.get(field)


def check_all_read(file: ConfigFile, architecture: str) -> None:
    """Raise CheckpointError for a field that was not read and may change the result."""
    for section, key in file.unread():
        if key in _OF_WINDOWS and section.value("use_sliding_window") is False:
            continue
        # By convention, null, false, 0 and empty values leave an option off.
        if section.value(key) and reason_to_ignore(key) is None:
            raise section.rejection(
                key,
                f"is not a field of {architecture} that is supported; remove it if it has no "
                "effect",
            )
