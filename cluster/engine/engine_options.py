"""The options of an engine, and the engine configuration that they make."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import msgspec

from pagedray.config import (
    AllReduce,
    CacheConfig,
    Device,
    EngineConfig,
    KVCacheDtype,
    LoadFormat,
    MatrixDtype,
    MessageSpecialTokens,
    ParallelConfig,
    PlacementStrategy,
    Preemption,
    QuantizationMethod,
    SchedulerConfig,
    SpeculationConfig,
    SpeculationMethod,
)
from pagedray.errors import CheckpointError, InvalidRequestError, StartupError
from pagedray.files import has_file
from pagedray.model_config import DraftHeadConfig, Dtype, ModelConfig, Task
from pagedray.sampling_params import SamplingParams
from pagedray.text import quote
from workers.hub.locate import check_weights_listed, hub_dtype, locate_model, with_revision
from workers.models.config_json.config_file import ConfigFile
from workers.models.config_json.quantization import with_method
from workers.models.families.drafters import (
    draft_head_method,
    mtp_head,
    read_draft_head,
    read_draft_model,
)
from workers.models.families.registry import check_parallel, read_model_config
from workers.weights.tensor_entries import folder_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from workers.hub.locate import LocatedModel

__all__ = [
    "EngineOptions",
    "check_options",
    "default_device",
    "engine_config",
    "full_name",
    "sampling_defaults",
    "speculation_config",
]

logger = logging.getLogger(__name__)

# A backend for chunks of long contexts would change the result.
_FOREIGN_BACKEND = re.compile(
    r"(?!dual_chunk)\w*(?:attn|attention|mla|pallas|ipex)\w*", re.IGNORECASE
)
Config = TypeVar("Config", CacheConfig, ParallelConfig, SchedulerConfig)
# Any: a dataclass field does not state the type of its default.
_DEFAULTS: dict[str, Any] = {
    field.name: field.default
    for config in (CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig, SpeculationConfig)
    for field in fields(config)
}

_FILE = "generation_config.json"
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_NONE = ("none", "vllm")
_NGRAM_MODELS = ("ngram", "[ngram]")
"""vLLM's other names of the method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The options of an engine; `pagedray serve --help` explains each.

    A device, dtype or task of None is chosen for the machine and the checkpoint.
    """

    tensor_parallel_size: int = _DEFAULTS["tensor_parallel_size"]
    device: Device | None = None
    dtype: Dtype | None = None
    task: Literal[Task, "pooling"] | None = None
    """`pooling`, vLLM's runner, is the usual task of the model, or `embed` if it generates text."""
    quantization: QuantizationMethod | None = None
    enable_expert_parallel: bool = _DEFAULTS["enable_expert_parallel"]
    executor: Literal["ray", "local"] = _DEFAULTS["executor"]
    num_threads: int | None = _DEFAULTS["num_threads"]
    placement_strategy: PlacementStrategy = _DEFAULTS["placement_strategy"]
    spare_ranks: int | None = _DEFAULTS["spare_ranks"]
    all_reduce: AllReduce = _DEFAULTS["all_reduce"]
    allow_unauthenticated_ray: bool = _DEFAULTS["allow_unauthenticated_ray"]
    block_size: int = _DEFAULTS["block_size"]
    num_blocks: int | None = _DEFAULTS["num_blocks"]
    num_cpu_blocks: int | None = _DEFAULTS["num_cpu_blocks"]
    memory_fraction: float = _DEFAULTS["memory_fraction"]
    enable_prefix_cache: bool = _DEFAULTS["enable_prefix_cache"]
    enable_cpu_prefix_cache: bool = _DEFAULTS["enable_cpu_prefix_cache"]
    disk_cache_folder: str | None = _DEFAULTS["disk_cache_folder"]
    disk_cache_bytes: int | None = _DEFAULTS["disk_cache_bytes"]
    kv_cache_dtype: KVCacheDtype = _DEFAULTS["kv_cache_dtype"]
    mamba_ssm_cache_dtype: MatrixDtype = _DEFAULTS["mamba_ssm_cache_dtype"]
    max_num_seqs: int | None = _DEFAULTS["max_num_seqs"]
    max_num_batched_tokens: int | None = _DEFAULTS["max_num_batched_tokens"]
    max_model_len: int | None = _DEFAULTS["max_model_len"]
    max_queued_requests: int = _DEFAULTS["max_queued_requests"]
    max_queued_tokens: int = _DEFAULTS["max_queued_tokens"]
    preemption: Preemption = _DEFAULTS["preemption"]
    itl_target_ms: float | None = _DEFAULTS["itl_target_ms"]
    load_format: LoadFormat = _DEFAULTS["load_format"]
    attention_backend: str = _DEFAULTS["attention_backend"]
    enforce_eager: bool = _DEFAULTS["enforce_eager"]
    max_graph_tokens: int = _DEFAULTS["max_graph_tokens"]
    load_seed: int = _DEFAULTS["load_seed"]
    structure_compile_s: float = _DEFAULTS["structure_compile_s"]
    message_special_tokens: MessageSpecialTokens = _DEFAULTS["message_special_tokens"]
    chat_template: str | None = _DEFAULTS["chat_template"]
    trust_request_chat_template: bool = _DEFAULTS["trust_request_chat_template"]
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | None = None  # Any: JSON
    speculative_config: dict[str, Any] | None = None  # Any: JSON
    revision: str | None = None
    tokenizer: str | None = None
    """Must be the model; the tokenizer of the model is always used."""
    tokenizer_revision: str | None = None
    """Must be the revision of the model."""
    download_dir: str | None = None
    hf_overrides: dict[str, Any] | None = None  # Any: JSON
    seed: int | None = None


def engine_config(
    model: str | Path,
    options: EngineOptions,
    report_progress: Callable[[str, float], None] | None = None,
) -> EngineConfig:
    """Return the configuration of an engine for a model: a folder or a Hub id.

    Reads no tensor of the checkpoint, and downloads none. `report_progress` is called with a
    description of the download, and the finished part. Raises StartupError.
    """
    options = replace(options, device=options.device or default_device())
    cache = None if options.download_dir is None else Path(options.download_dir)
    located = locate_model(
        full_name(model, options),
        report_progress,
        # Ranks may have another working directory.
        cache=None if cache is None else cache.expanduser().absolute(),
    )
    model_config = _model_config(located, options)
    parallel = _config_from(ParallelConfig, options)
    if parallel.enable_expert_parallel:
        model_config = model_config.with_expert_parallel()
    check_parallel(model_config, parallel.tensor_parallel_size)
    if options.max_model_len is not None and options.max_model_len > model_config.max_positions:
        raise CheckpointError(
            f"max_model_len {options.max_model_len} is more than the "
            f"{model_config.max_positions} positions of {model_config.name}."
        )
    drafter = read_drafter(
        options.speculative_config, model_config, load_format=options.load_format
    )
    if isinstance(drafter, ModelConfig):
        check_parallel(drafter, parallel.tensor_parallel_size)
    return EngineConfig(
        model=model_config,
        cache=_config_from(CacheConfig, options),
        scheduler=_config_from(SchedulerConfig, options),
        parallel=parallel,
        speculation=speculation_config(options.speculative_config, drafter),
        drafter=drafter,
        load_format=options.load_format,
        attention_backend=_own_backend(options.attention_backend),
        enforce_eager=options.enforce_eager,
        max_graph_tokens=options.max_graph_tokens,
        load_seed=options.load_seed,
        structure_compile_s=options.structure_compile_s,
        message_special_tokens=options.message_special_tokens,
        chat_template=options.chat_template,
        trust_request_chat_template=options.trust_request_chat_template,
        sampling_defaults=sampling_defaults(
            options.generation_config, located.folder, options.override_generation_config
        ),
        # vLLM's clients write -1 for a random seed.
        seed=None if options.seed == -1 else options.seed,
    )


def read_drafter(
    given: Mapping[str, object] | None, target: ModelConfig, *, load_format: LoadFormat
) -> DraftHeadConfig | ModelConfig | None:
    """Return the draft head or the draft model of vLLM's fields. Raises StartupError."""
    for text in () if given is None else (*given, *given.values()):
        # No folder has a name with a null character or half of a surrogate pair.
        if isinstance(text, str) and not text.isprintable():
            raise StartupError(
                f"speculative_config may only contain printable text, not {quote(text)}."
            )
    if given is not None and given.get("method") == "mtp":
        return mtp_head(target)
    model = (given or {}).get("model")
    if given is None or not model or model in _NGRAM_MODELS:
        return None
    folder = Path(str(model))
    method = given.get("method") or draft_head_method(folder) or "draft_model"
    if method == "draft_model":
        return read_draft_model(folder, target)
    if method != "eagle3":
        return None
    return read_draft_head(folder, target, reads_tensors=load_format != "dummy")


def speculation_config(
    given: Mapping[str, object] | None, drafter: DraftHeadConfig | ModelConfig | None = None
) -> SpeculationConfig | None:
    """Return the configuration of speculation of vLLM's fields. Raises StartupError.

    `drafter` is the draft head or the draft model that they name, if any.
    """
    if not given:
        return None
    chosen = {name: value for name, value in given.items() if value is not None}
    model = chosen.pop("model", None)
    if model in _NGRAM_MODELS:
        chosen["method"] = "ngram"
    if isinstance(drafter, DraftHeadConfig):
        chosen["method"] = "eagle3" if drafter.mtp is None else "mtp"
        if drafter.num_drafts is not None:
            chosen.setdefault("num_speculative_tokens", drafter.num_drafts)
    is_ngram = model is None or model in _NGRAM_MODELS
    method = chosen.setdefault("method", "ngram" if is_ngram else "draft_model")
    *others, last = get_args(SpeculationMethod)
    if method not in (*others, last):
        raise StartupError(
            f"speculative_config.method {method!s:.80} is not supported; use "
            f"{', '.join(others)} or {last}."
        )
    if method == "suffix":
        depth = "suffix_decoding_max_tree_depth"
        chosen.setdefault("num_speculative_tokens", chosen.get(depth, _DEFAULTS[depth]))
    if method in ("ngram", "suffix") and not is_ngram:
        raise StartupError(
            f"speculative_config.model has no effect with method {method}; remove one of them."
        )
    if method in ("eagle3", "draft_model") and drafter is None:
        kind = "draft head" if method == "eagle3" else "draft model"
        raise StartupError(f"speculative_config.model must be the {kind} for method {method}.")
    known = {field.name for field in fields(SpeculationConfig)}
    for name in chosen:
        if name not in known:
            raise StartupError(
                f"speculative_config.{name:.80} is not supported; the fields are "
                f"{', '.join(sorted({*known, 'model'}))}."
            )
    # Of two lengths, one stands for both.
    lengths = "prompt_lookup_min", "prompt_lookup_max"
    for name, other in (lengths, lengths[::-1]):
        value = chosen.get(name)
        if isinstance(value, int):
            chosen.setdefault(other, max(1, value))
    try:
        return msgspec.convert(chosen, SpeculationConfig)
    except msgspec.ValidationError as error:
        raise StartupError(f"speculative_config is invalid: {error}.") from None


def full_name(model: str | Path, options: EngineOptions) -> str | Path:
    """Return the model with the revision of the options. Raises StartupError.

    The tokenizer that they name must be that of the model.
    """
    named = with_revision(model, options.revision)
    tokenizer = options.tokenizer
    if tokenizer is not None and not _is_same(tokenizer, model) and tokenizer != str(named):
        raise StartupError(
            f"tokenizer {tokenizer} is not supported: the tokenizer is read from the model, "
            f"{model}; copy the files of the tokenizer to the folder of the model."
        )
    revision = options.tokenizer_revision
    if revision not in (None, options.revision, str(named).partition("@")[2] or "main"):
        raise StartupError(
            f"tokenizer_revision {revision} is not supported: the tokenizer is that of the "
            "revision of the model, which revision sets."
        )
    return named


def _own_backend(name: str) -> str:
    """Return the name of an attention backend; vLLM's other backends are `auto`."""
    if _FOREIGN_BACKEND.fullmatch(name) is None:
        return name
    logger.info(
        "attention_backend %s has no effect: auto selects the fastest backend for the model and "
        "the device.",
        name,
    )
    return "auto"


def _is_same(tokenizer: str, model: str | Path) -> bool:
    return tokenizer == str(model) or Path(tokenizer).absolute() == Path(model).absolute()


def _model_config(located: LocatedModel, options: EngineOptions) -> ModelConfig:
    """Return the configuration of a model as options change it. Raises StartupError."""
    hub = None if options.load_format == "dummy" else located.hub
    read = partial(
        read_model_config,
        located.folder,
        dtype=options.dtype,
        stored_dtype=folder_dtype if hub is None else partial(hub_dtype, hub),
        overrides=options.hf_overrides,
    )
    config = read(task=None if options.task == "pooling" else options.task)
    if options.task == "pooling" and config.task == "generate":
        config = read(task="embed")
    if options.quantization is not None:
        config = with_method(config, options.quantization)
    if hub is not None and located.gguf is None:
        check_weights_listed(hub, located.folder)
    if located.gguf is not None:
        config = replace(config, name=Path(located.gguf).stem, gguf=located.gguf)
    if located.hub is not None:
        config = replace(config, name=located.hub.id, hub=located.hub)
    if options.device == "cpu" and config.dtype == "float16":
        raise StartupError(
            "dtype float16 is not supported on the CPU; use --dtype bfloat16 or float32."
        )
    return config if options.max_model_len is None else config.with_context(options.max_model_len)


def check_options(options: EngineOptions) -> None:
    """Raise StartupError if options are invalid for any model."""
    options = replace(options, device=options.device or default_device())
    _config_from(ParallelConfig, options)
    _config_from(CacheConfig, options)
    _config_from(SchedulerConfig, options)


def _config_from(kind: type[Config], options: EngineOptions) -> Config:
    """Return a configuration with the options of the same names as fields."""
    return kind(**{field.name: getattr(options, field.name) for field in fields(kind)})


def default_device() -> Device:
    """Return the device that ranks use if no option says it."""
    # Asking torch would cost seconds in a process that may never need it.
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def sampling_defaults(
    given: str | Path, model_folder: Path, overrides: Mapping[str, object] | None = None
) -> tuple[tuple[str, float], ...]:
    """Return the names and values of parameters of requests that do not set them.

    `given` is `auto`, the model's own file if there is one; `none` or `vllm`; or another folder.
    `overrides` take precedence; a value of None removes a parameter. Raises StartupError.
    """
    for name in overrides or ():
        if name not in _NAMES:
            raise StartupError(
                f"override_generation_config.{name:.80} is not supported: the defaults of requests "
                f"are {', '.join(_NAMES)}; requests set other parameters themselves."
            )
    path = _path(given, model_folder)
    file = {} if path is None else _values(ConfigFile.read(path))
    changed = ConfigFile(Path("override_generation_config"), {**file, **(overrides or {})})
    return tuple(_values(changed).items())


def _path(given: str | Path, model_folder: Path) -> Path | None:
    """Return the file of the defaults, if any. Raises StartupError."""
    if str(given) in _NONE:
        return None
    is_auto = str(given) == "auto"
    path = (model_folder if is_auto else Path(given)) / _FILE
    if has_file(path):
        return path
    if is_auto:
        return None
    raise StartupError(
        f"generation_config must be auto, none or a folder with {_FILE}, not {given}."
    )


def _values(file: ConfigFile) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in _NAMES:
        value = file.value(name)
        if value is None:
            continue
        given: dict[str, Any] = {name: value}  # Any: fields of all types
        try:
            SamplingParams(**given)
        except InvalidRequestError as error:
            raise CheckpointError(f"{file.path}: {error}") from error
        assert isinstance(value, int | float)
        found[name] = value
    return found
