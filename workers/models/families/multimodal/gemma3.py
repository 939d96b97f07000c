"""The text of Gemma-3 from 4B on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.models.config_json.family import Family
from workers.models.families.multimodal.text_part import (
    TEXT_SECTION,
    as_text_part,
    is_tied_by_default,
)
from workers.models.families.windowed.gemma3 import read_gemma3

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["GEMMA3_MULTIMODAL"]

# Published files leave out values that equal these defaults of transformers.
_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
}


def _read(file: ConfigFile) -> ModelConfig:
    text = file.section(TEXT_SECTION, _DEFAULTS)
    # Transformers reads this soft cap, but applies it to models without vision only.
    text.reject_unless("final_logit_softcapping", None)
    return as_text_part(
        read_gemma3(text),
        file,
        text,
        architecture=GEMMA3_MULTIMODAL.architecture,
        is_tied=is_tied_by_default(file),
        model_types=("gemma3_text",),
    )


GEMMA3_MULTIMODAL = Family(
    architecture="Gemma3ForConditionalGeneration", model_types=("gemma3",), read=_read
)
