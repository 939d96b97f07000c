"""The supported families, and the `ModelConfig` of a checkpoint's folder. It knows no tensor."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.errors import CheckpointError, StartupError
from pagedray.files import has_file, has_folder
from pagedray.weight_format import Int4Format, Quantization
from workers.models.config_json.config_file import ConfigFile, check_all_read
from workers.models.config_json.family import Family, model_dtype
from workers.models.config_json.quantization import read_quantization, with_quantization
from workers.models.config_json.score_section import is_reranker, with_answers
from workers.models.config_json.sentence_modules import dense_modules
from workers.models.families.alibi import BLOOM, MPT
from workers.models.families.bert import BERT, ROBERTA
from workers.models.families.falcon_h1 import FALCON_H1
from workers.models.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_MULTIMODAL
from workers.models.families.gemma4 import (
    GEMMA4,
    GEMMA4_MULTIMODAL,
    GEMMA4_UNIFIED,
    GEMMA4_UNIFIED_TEXT,
)
from workers.models.families.gpt_oss import GPT_OSS
from workers.models.families.granite import (
    GRANITE,
    GRANITE_HYBRID,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    GRANITE_MOE_SWA,
)
from workers.models.families.lfm2 import LFM2, LFM2_MOE
from workers.models.families.llama import (
    COHERE2,
    ERNIE4_5,
    GLM,
    GLM4,
    GLM4_MOE,
    LLAMA,
    PHI3,
    SEED_OSS,
    SMOLLM3,
    STARCODER2,
)
from workers.models.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL, MISTRAL3, MIXTRAL
from workers.models.families.nemotron import NEMOTRON_H
from workers.models.families.olmo import OLMO2, OLMO3, OLMOE
from workers.models.families.qwen import QWEN2, QWEN2_5_VL, QWEN3, QWEN3_MOE, QWEN3_VL
from workers.models.families.qwen_hybrid import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_TEXT,
    QWEN3_5_TEXT,
    QWEN3_NEXT,
)
from workers.models.families.text_part import TEXT_SECTION
from workers.weights.tensor_entries import folder_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pagedray.model_config import Dtype, ExpertsConfig, ModelConfig, RecurrentConfig, Task

__all__ = ["FAMILIES", "FAMILY_BY_NAME", "check_parallel", "read_model_config"]

logger = logging.getLogger(__name__)

FAMILIES = (
    *(BERT, BLOOM, COHERE2, ERNIE4_5, GEMMA, GEMMA2, GEMMA3, GLM, GLM4, GLM4_MOE, GPT_OSS),
    GRANITE,
    *(GRANITE_MOE, GRANITE_MOE_SHARED, GRANITE_MOE_SWA, LLAMA, MINISTRAL, MINISTRAL3, MISTRAL),
    *(MIXTRAL, MPT, OLMO2, OLMO3, OLMOE, PHI3, QWEN2, QWEN3, QWEN3_MOE, ROBERTA, SEED_OSS),
    *(SMOLLM3, STARCODER2, GEMMA3_MULTIMODAL, MISTRAL3, QWEN2_5_VL, QWEN3_VL, GEMMA4),
    *(GEMMA4_UNIFIED_TEXT, GEMMA4_MULTIMODAL, GEMMA4_UNIFIED, LFM2, LFM2_MOE, QWEN3_NEXT),
    *(GRANITE_HYBRID, NEMOTRON_H, QWEN3_5_TEXT, QWEN3_5_MOE_TEXT, QWEN3_5, QWEN3_5_MOE),
    FALCON_H1,
)
FAMILY_BY_NAME = {
    word: family for family in FAMILIES for word in (family.architecture, *family.aliases)
}
# Each refers to Python code of the checkpoint, which is never imported.
_CODE_KEYS = ("auto_map", "custom_pipelines")
_HEAD = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")
_OF_IMAGES = re.compile(r"ForConditionalGeneration$|VL|Llava|Vision|MM")
# Unsupported requirements of widespread architectures, by the start of their names.
_OBSTACLES = {
    "multi-head latent attention (MLA)": (
        *("DeepseekV", "Glm4MoeLite", "GlmMoeDsa", "KimiK", "LongcatFlash", "MiniCPM3"),
    ),
    "recurrent layers": (
        *("Bamba", "FalconMamba", "Jamba", "KimiLinear", "Lfm3"),
        *("Mamba", "OlmoHybrid", "RecurrentGemma", "Rwkv"),
        "Zamba",
    ),
}

_OUTPUT_HEAD = "lm_head"


def read_model_config(
    folder: Path,
    *,
    dtype: Dtype | None = None,
    task: Task | None = None,
    stored_dtype: Callable[[Path], Dtype | None] = folder_dtype,
    overrides: Mapping[str, object] | None = None,
) -> ModelConfig:
    """Return the configuration of the checkpoint in a folder; `dtype` overrides the file's dtype.

    If neither is given, `stored_dtype` returns the dtype of the tensors, or None without tensors.
    `overrides` replace fields of config.json before any of them is read. A `task` of None is the
    usual task: to score for a cross-encoder, to embed for other encoders and for a checkpoint of
    sentence-transformers, else to generate. Raises CheckpointError, and StartupError for a task
    that the model cannot do.
    """
    path = folder / "config.json"
    if not has_folder(folder):
        raise CheckpointError(
            f"{folder} is not a folder; a model is a folder with config.json and weights."
        )
    if not has_file(path):
        raise CheckpointError(f"No config.json found in {folder}.")
    file = ConfigFile.read(path)
    if overrides:
        file = file.with_overrides(overrides)
    family = _family(file)
    file.note_read(*_CODE_KEYS)
    if any(file.value(key) for key in _CODE_KEYS):
        logger.warning(
            "The code that config.json names in auto_map is not run; PagedRay computes %s itself.",
            family.architecture,
        )
    quantization = None if family.reads_quantization else read_quantization(file)
    file.choice("model_type", family.model_types, family.model_types[0])
    file.reject_unless("is_encoder_decoder", False)
    config = family.read(file)
    if quantization is not None:
        config = with_quantization(config, file, quantization)
    declared = _declared_dtype(file, config)
    check_all_read(file, family.architecture)
    tasks = _tasks(config, file)
    if task is not None and task not in tasks:
        raise StartupError(
            f"The model {config.name} cannot {task}; its task can be {' or '.join(tasks)}."
        )
    if (task or tasks[0]) == "embed":
        config = replace(config, dense_modules=dense_modules(folder, config.hidden_size))
    config = replace(
        config,
        dtype=dtype or declared or stored_dtype(folder) or _default_dtype(file),
        task=task or tasks[0],
        eos_token_ids=_with_generation_eos(config),
    )
    return with_answers(config) if config.task == "score" else config


def check_parallel(model: ModelConfig, num_ranks: int) -> None:
    """Raise StartupError unless the model can be sharded over this many ranks."""
    if model.num_heads % num_ranks:
        raise _not_divisible("attention heads", model.num_heads, num_ranks)
    if model.recurrent is not None:
        _check_recurrent(model, model.recurrent, num_ranks)
    for number in dict.fromkeys(model.heads_of(i).num_kv_heads for i in range(model.num_layers)):
        if number % num_ranks and num_ranks % number:
            raise StartupError(
                f"{number} KV heads cannot be sharded over {num_ranks} ranks; one number must be a "
                "multiple of the other."
            )
    if model.experts is not None:
        _check_experts(model, model.experts, num_ranks)
    if model.has_dense_layers and model.intermediate_size % num_ranks:
        raise _not_divisible("MLP columns (intermediate_size)", model.intermediate_size, num_ranks)
    check_cuts(model, num_ranks)


def _check_recurrent(model: ModelConfig, recurrent: RecurrentConfig, num_ranks: int) -> None:
    sizes = {"key heads of recurrent layers": recurrent.num_key_heads}
    if recurrent.kind == "short_conv":
        sizes = {"channels of convolutions (hidden_size)": model.hidden_size}
    elif recurrent.kind == "mamba2":
        sizes = {"heads of recurrent layers": recurrent.num_value_heads}
        # Ranks share the only group.
        if recurrent.num_key_heads > 1:
            sizes["groups of heads of recurrent layers"] = recurrent.num_key_heads
    for what, size in sizes.items():
        if size % num_ranks:
            raise _not_divisible(what, size, num_ranks)


def _check_experts(model: ModelConfig, experts: ExpertsConfig, num_ranks: int) -> None:
    size = experts.intermediate_size
    if experts.is_expert_parallel:
        if experts.num_experts % num_ranks:
            raise _not_divisible("experts", experts.num_experts, num_ranks)
    elif (step := _column_step(model, experts)) > 1:
        if (num_blocks := -(-size // step)) < num_ranks:
            raise StartupError(
                f"{num_blocks} blocks of {step} columns of each expert cannot be sharded over "
                f"{num_ranks} ranks; use at most {num_blocks}, or enable_expert_parallel."
            )
    elif size % num_ranks:
        raise _not_divisible("columns of each expert", size, num_ranks)
    if experts.shared_size is not None and experts.shared_size % num_ranks:
        raise _not_divisible("columns of the shared MLP", experts.shared_size, num_ranks)


def _column_step(model: ModelConfig, experts: ExpertsConfig) -> int:
    """Return the number of columns of an expert that ranks do not divide, in any layer."""
    quantization, names = model.quantization, model.names
    if quantization is None:
        return experts.column_step(None)
    layers = (i for i in range(model.num_layers) if model.experts_of(i) is not None)
    prefixes = map(names.decoder_layer.format, layers)
    formats = (quantization.format_of(names.expert_layers(prefix)) for prefix in prefixes)
    return max(map(experts.column_step, formats), default=1)


def _tasks(config: ModelConfig, file: ConfigFile) -> tuple[Task, ...]:
    """Return the tasks of a model, the usual task first."""
    if config.is_encoder or config.task == "score":
        return (config.task,)
    if config.has_states:
        return ("generate",)
    if any(map(_has_no_head, file.words("architectures"))):
        return ("embed",)
    # Sentence-transformers marks a checkpoint that was made to embed.
    tasks: tuple[Task, ...] = ("generate", "embed")
    if has_file(config.folder / "modules.json"):
        tasks = ("embed", "generate")
    if config.score_head != "answer":
        return tasks
    return ("score", *tasks) if is_reranker(config.folder) else (*tasks, "score")


def _declared_dtype(file: ConfigFile, config: ModelConfig) -> Dtype | None:
    """Return the dtype of the whole file, or else of the text model in it, or None."""
    sections = [file]
    if config.text_tensors is not None and TEXT_SECTION in file:
        sections.append(file.section(TEXT_SECTION))
    declared = [model_dtype(section) for section in sections]
    return next((one for one in declared if one is not None), None)


def _default_dtype(file: ConfigFile) -> Dtype:
    """Return the dtype of a checkpoint that does not tell it: the default of transformers.

    The kernels for quantized weights compute in bfloat16.
    """
    return "bfloat16" if file.value("quantization_config") else "float32"


def _has_no_head(architecture: str) -> bool:
    """Return whether an architecture is a supported decoder without its output head."""
    return architecture not in FAMILY_BY_NAME and _with_head(architecture) in FAMILY_BY_NAME


def _with_head(architecture: str) -> str:
    """Return the name of a decoder with its head, such as Qwen3ForCausalLM for Qwen3Model."""
    return f"{architecture.removesuffix('Model').removesuffix('Text')}ForCausalLM"


def _family(file: ConfigFile) -> Family:
    given = file.words("architectures")
    if not given:
        raise file.rejection(
            "architectures",
            "is missing; it must name one of the architectures in docs/models.md, such as "
            "Qwen3ForCausalLM",
        )
    for architecture in given:
        if architecture in FAMILY_BY_NAME:
            return FAMILY_BY_NAME[architecture]
        if _has_no_head(architecture):
            return FAMILY_BY_NAME[_with_head(architecture)]
    raise CheckpointError(
        f"{file.path}: {_shown_architecture(given[0])} is not supported{_obstacle(given[0])}. "
        f"{_alternative(given[0])}; docs/models.md lists all."
    )


def _shown_architecture(name: str) -> str:
    return name if name.isidentifier() and len(name) <= 60 else f"{name[:60]!r}"


def _obstacle(architecture: str) -> str:
    """Return the unsupported requirement of a widespread architecture, or None."""
    for what, starts in _OBSTACLES.items():
        if architecture.startswith(starts):
            return f", because it has {what}"
    return ""


def _alternative(architecture: str) -> str:
    """Return which supported family is nearest to an architecture, or which there are."""
    nearest = _nearest_label(architecture)
    if nearest is not None:
        return f"The nearest supported family is {nearest}"
    if _OF_IMAGES.search(architecture):
        names = [one.architecture for one in FAMILIES if _OF_IMAGES.search(one.architecture)]
        labels = [_label(name) for name in names if "Moe" not in name]
        return f"The supported multimodal families are {', '.join(labels)}, for text only"
    return "Supported architectures include LlamaForCausalLM and Qwen3ForCausalLM"


def _nearest_label(architecture: str) -> str | None:
    letters = _leading_letters(architecture)
    for part, label in (("roberta", "XLMRoberta"), ("camembert", "Roberta"), ("bert", "Bert")):
        if part in letters:
            return label
    by_label = {_label(name): _leading_letters(name) for name in FAMILY_BY_NAME}
    related = {label: stem for label, stem in by_label.items() if letters.startswith(stem)}
    longest = max(related.values(), key=len, default="")

    def likeness(label: str) -> tuple[bool, int, int]:
        digits = [int(digit) for digit in label if digit.isdigit()]
        return ("Moe" in label) == ("Moe" in architecture), next(iter(digits), 0), -len(label)

    return max((one for one in related if related[one] == longest), key=likeness, default=None)


def _leading_letters(architecture: str) -> str:
    """Return the letters before the version of a model, in lower case."""
    label = _label(architecture)
    return label[: next((i for i, one in enumerate(label) if not one.isalpha()), None)].lower()


def _label(architecture: str) -> str:
    """Return the name of a family, such as Qwen3 for Qwen3ForCausalLM."""
    return _HEAD.sub("", architecture)


def _with_generation_eos(config: ModelConfig) -> tuple[int, ...]:
    """Return the EOS ids of both files; instruct models list more in generation_config.json."""
    path = config.folder / "generation_config.json"
    if not has_file(path):
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


def check_cuts(model: ModelConfig, num_ranks: int) -> None:
    """Raise StartupError if a rank's part of a layer's inputs would cut a group of them."""
    if model.quantization is None:
        return
    names = model.names
    for index in range(model.num_layers):
        experts = model.experts_of(index)
        layers = {names.attention_output: model.num_heads * model.heads_of(index).head_size}
        if experts is None or model.has_side_experts:
            layers[names.mlp_output] = model.mlp_size(index)
        elif experts.shared_size is not None:
            layers[names.shared_output] = experts.shared_size
        for output, in_size in layers.items():
            name = f"{names.decoder_layer.format(index)}.{output}"
            format = model.quantization.format_of([name])
            if isinstance(format, Int4Format) and format.is_ordered and num_ranks > 1:
                raise StartupError(
                    f"{name} is stored in another order of its inputs (desc_act), which "
                    f"{num_ranks} ranks cannot divide; use one rank."
                )
            if format is not None and num_ranks > 1 and in_size // num_ranks % format.in_step:
                raise StartupError(
                    f"{name} has {in_size} inputs in groups of {format.in_step}, which "
                    f"{num_ranks} ranks cannot divide evenly; use fewer ranks."
                )
    if _has_quantized_head(model, model.quantization) and model.vocab_size % num_ranks:
        raise StartupError(
            f"{_OUTPUT_HEAD} is quantized and has {model.vocab_size} outputs, which {num_ranks} "
            "ranks cannot divide evenly; use a number of ranks that can."
        )


def _has_quantized_head(model: ModelConfig, quantization: Quantization) -> bool:
    has_head = quantization.has_head and not model.has_tied_embeddings and not model.pools
    return has_head and quantization.format_of([_OUTPUT_HEAD]) is not None
