"""The text of Mistral-Small 3.1 and 3.2 (a Mistral), and of Ministral 3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.models.config_json.family import Family
from workers.models.families.dense.ministral3 import read_ministral3
from workers.models.families.dense.mistral import read_mistral
from workers.models.families.multimodal.text_part import (
    TEXT_SECTION,
    as_text_part,
    is_tied_by_default,
)

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["MISTRAL3"]

_READERS = {"mistral": read_mistral, "ministral3": read_ministral3}


def _read(file: ConfigFile) -> ModelConfig:
    text = file.section(TEXT_SECTION)
    kind = text.choice("model_type", _READERS, "mistral")
    return as_text_part(
        _READERS[kind](text),
        file,
        text,
        architecture=MISTRAL3.architecture,
        is_tied=is_tied_by_default(file),
        model_types=_READERS,
    )


MISTRAL3 = Family(
    architecture="Mistral3ForConditionalGeneration", model_types=("mistral3",), read=_read
)
