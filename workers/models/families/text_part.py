"""Common part of multimodal families: the text part is a decoder, the rest is not loaded.

The configuration of the text is the section `text_config`. Some of its fields may be at the top
level, where they win.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import ModelConfig, TextTensors
from workers.models.config_json.family import check_causal, eos_token_ids

if TYPE_CHECKING:
    from collections.abc import Iterable

    from workers.models.config_json.config_file import ConfigFile

__all__ = ["TEXT_SECTION", "as_text_part", "is_tied_by_default"]

TEXT_SECTION = "text_config"
_HEAD_PREFIX = ("language_model.lm_head.", "lm_head.")
# As transformers 4 and 5 write them. Qwen2.5-VL was published with the prefix of a plain decoder.
_PREFIXES = (_HEAD_PREFIX, ("language_model.model.", "model."), ("model.language_model.", "model."))
_MODULES_OF_VISION = ("visual.", "vision_tower.", "multi_modal_projector.")
_SKIPPED = (*_MODULES_OF_VISION, *(f"model.{module}" for module in _MODULES_OF_VISION))
# Fields of images and videos have no effect on the text part.
_VISION_FIELDS = (
    *("vision_config", "image_token_id", "image_token_index", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id", "vision_token_id", "mm_tokens_per_image"),
    *("boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index"),
    *("projector_hidden_act", "multimodal_projector_bias", "spatial_merge_size"),
    *("vision_feature_layer",),
)


def is_tied_by_default(file: ConfigFile) -> bool:
    """Return whether the head is the embedding, as it is if the field is missing, but not null."""
    return not file.has_null("tie_word_embeddings") and file.flag("tie_word_embeddings", True)


def as_text_part(
    config: ModelConfig,
    file: ConfigFile,
    text: ConfigFile,
    *,
    is_tied: bool,
    model_types: Iterable[str],
) -> ModelConfig:
    """Return the configuration that was read of `text`, completed by the whole file.

    `model_types` are the values of `model_type` in `text`, the first of which is the default.
    """
    check_causal(file)
    file.note_read(*_VISION_FIELDS)
    if text is not file:
        words = tuple(model_types)
        text.choice("model_type", words, words[0])
        text.note_read("architectures")
        file.note_copies(text)
    return replace(
        config,
        text_tensors=TextTensors(_PREFIXES, _SKIPPED),
        has_tied_embeddings=is_tied,
        eos_token_ids=eos_token_ids(file, config.vocab_size) or config.eos_token_ids,
    )
