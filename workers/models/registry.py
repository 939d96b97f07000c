"""The supported families, and the `ModelConfig` of a checkpoint's folder. It knows no tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.errors import CheckpointError, StartupError
from workers.models.bert_family import BERT
from workers.models.bloom import BLOOM
from workers.models.config_file import ConfigFile
from workers.models.gemma2 import GEMMA2
from workers.models.gemma3 import GEMMA3
from workers.models.llama import LLAMA
from workers.models.mistral import MISTRAL
from workers.models.mpt import MPT
from workers.models.phi3 import PHI3
from workers.models.qwen2 import QWEN2
from workers.models.qwen3 import QWEN3

if TYPE_CHECKING:
    from pathlib import Path

    from pagedray.config import Dtype, ModelConfig
    from workers.models.family import Family

__all__ = ["check_parallel", "read_model_config", "supported_architectures"]

_FAMILIES = {
    word: family
    for family in (BERT, BLOOM, GEMMA2, GEMMA3, LLAMA, MISTRAL, MPT, PHI3, QWEN2, QWEN3)
    for word in (family.architecture, *family.aliases)
}
# Each refers to Python code of the checkpoint, which is never imported.
_CODE_KEYS = ("auto_map", "custom_pipelines")


def supported_architectures() -> tuple[str, ...]:
    """Return the supported values of `architectures` in config.json."""
    return tuple(_FAMILIES)


def read_model_config(folder: Path, *, dtype: Dtype | None = None) -> ModelConfig:
    """Return the configuration of the checkpoint in a folder; `dtype` overrides that of the file.

    Raises CheckpointError.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder; a model is a folder with config.json and weights."
        )
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"No config.json found in {folder}.")
    file = ConfigFile.read(path)
    family = _family(file)
    for key in _CODE_KEYS:
        if file.value(key) and not family.may_name_code:
            raise file.refusal(key, "requires code from the checkpoint, which is never run")
    if file.value("quantization_config"):
        raise file.refusal("quantization_config", "is not supported; use unquantized weights")
    config = family.read(file)
    return replace(
        config,
        dtype=dtype or config.dtype,
        eos_token_ids=_with_generation_eos(config),
    )


def check_parallel(model: ModelConfig, num_ranks: int) -> None:
    """Raise StartupError unless the model can be sharded over this many ranks."""
    if model.num_heads % num_ranks:
        raise _not_divisible("attention heads", model.num_heads, num_ranks)
    if model.num_kv_heads % num_ranks and num_ranks % model.num_kv_heads:
        raise StartupError(
            f"{model.num_kv_heads} KV heads cannot be sharded over {num_ranks} ranks; one number "
            "must be a multiple of the other."
        )
    if model.intermediate_size % num_ranks:
        raise _not_divisible("MLP columns (intermediate_size)", model.intermediate_size, num_ranks)


def _family(file: ConfigFile) -> Family:
    known = ", ".join(_FAMILIES)
    given = file.words("architectures")
    if not given:
        raise file.refusal("architectures", f"is missing; supported are {known}")
    for architecture in given:
        if architecture in _FAMILIES:
            return _FAMILIES[architecture]
    raise file.refusal(
        "architectures", f"names {given[0][:60]!r}, which is not supported; supported are {known}"
    )


def _with_generation_eos(config: ModelConfig) -> tuple[int, ...]:
    """Return the EOS ids of both files; instruct models list more in generation_config.json."""
    path = config.folder / "generation_config.json"
    if not path.is_file():
        return config.eos_token_ids
    more = ConfigFile.read(path).token_ids("eos_token_id")
    ids = dict.fromkeys((*config.eos_token_ids, *more))
    return tuple(token_id for token_id in ids if token_id < config.vocab_size)


def _not_divisible(what: str, size: int, num_ranks: int) -> StartupError:
    fitting = [n for n in range(1, min(size, 64) + 1) if size % n == 0]
    return StartupError(
        f"{size} {what} cannot be sharded evenly over {num_ranks} ranks; "
        f"use {', '.join(map(str, fitting))}."
    )
