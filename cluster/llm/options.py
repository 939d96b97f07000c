"""The options of `LLM` and `AsyncLLM`, the arguments of vLLM that both reject, and exit."""

from __future__ import annotations

import atexit
import functools
import os
from typing import TYPE_CHECKING, Literal, ParamSpec, TypedDict, TypeVar

from pagedray.errors import invalid_field
from pagedray.text import nearest_name, quote

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pagedray.config import (
        AllReduce,
        Device,
        EngineConfig,
        MessageSpecialTokens,
        PlacementStrategy,
        Preemption,
    )
    from pagedray.model_config import Task

__all__ = ["ExitClose", "LLMOptions", "PublicLLM", "with_vllm_arguments"]

_ADAPTERS = "merge the adapter into the weights"
_MEDIA = "requests with images, audio or video are rejected"
_REJECTED: Mapping[str, str] = {
    "chat_template_content_format": "the form that the chat template reads is detected",
    "concurrency_limit": "the scheduler decides how many requests run at once",
    "data_parallel_rank": "use num_replicas of Ray Serve",
    "guided_options_request": "use structure of SamplingParams",
    "lora_request": _ADAPTERS,
    "mm_processor_kwargs": _MEDIA,
    "pooling_params": "use the arguments of embed() and score()",
    "pooling_task": "use embed() or score()",
    "priority": "only requests to a server have a priority",
    "prompt_adapter_request": _ADAPTERS,
    "tokenization_kwargs": "tokenize prompts in the program, and pass their token ids",
    "trace_headers": "only requests to a server are part of traces",
}
"""Arguments, each with an alternative or the reason."""
_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "chat_template_content_format": (None, "auto", "openai", "string"),
    "priority": (None, 0),
}
"""Values that ask for nothing, if it is not only None."""
_ENGINE = "the engine is private; its counters are in stats()"
_PREFIXES = "prompts with another cache_salt do not share cached prefixes"
_PROFILE = "profile the processes of the ranks with py-spy or Nsight"
_QUEUE = "pass all prompts to generate() or chat(); AsyncLLM takes them one by one"
_RANKS = "the code of ranks cannot be called; their counters are in stats()"
_WEIGHTS = "weights are loaded once, by the constructor"
_SLEEP = "{close}() frees all memory, and so does the end of a with block"
_CLASSES = "named classes are not supported; use score() of LLM"
_MISSING: Mapping[str, str] = {
    **dict.fromkeys(("sleep", "wake_up", "is_sleeping"), _SLEEP),
    **dict.fromkeys(("reset_prefix_cache", "reset_encoder_cache"), _PREFIXES),
    "reset_mm_cache": _MEDIA,
    **dict.fromkeys(("collective_rpc", "apply_model"), _RANKS),
    **dict.fromkeys(("get_metrics", "do_log_stats", "log_stats"), "use stats()"),
    **dict.fromkeys(
        ("llm_engine", "engine_core", "engine", "input_processor", "output_processor", "renderer"),
        _ENGINE,
    ),
    **dict.fromkeys(
        ("model_config", "vllm_config", "get_vllm_config", "get_model_config"),
        "GET /server_info of a server returns the configuration",
    ),
    **dict.fromkeys(("start_profile", "stop_profile"), _PROFILE),
    **dict.fromkeys(("enqueue", "enqueue_chat", "wait_for_completion"), _QUEUE),
    **dict.fromkeys(("add_lora", "remove_lora", "list_loras", "pin_lora"), _ADAPTERS),
    **dict.fromkeys(
        (
            *("init_weight_transfer_engine", "start_weight_update", "update_weights"),
            *("finish_weight_update", "scale_elastic_ep"),
        ),
        _WEIGHTS,
    ),
    **dict.fromkeys(("classify", "reward"), _CLASSES),
    **dict.fromkeys(
        ("pause_generation", "resume_generation", "is_paused"),
        "call abort() for each request, and submit them again later",
    ),
    **dict.fromkeys(("is_running", "is_stopped", "errored", "dead_error"), "await check_health()"),
    "add_request": "use generate()",
    "encode": "use embed() or score() of LLM; get_tokenizer() encodes texts",
    "get_supported_tasks": "the option task selects the task of a model",
    "get_world_size": "the option tensor_parallel_size sets the number of ranks",
    "preprocess_chat": "get_tokenizer() encodes texts; chat() applies the chat template",
    "set_tokenizer": "the tokenizer is that of the model",
    "supported_tasks": "the option task selects the task of a model",
    "tokenizer": "use get_tokenizer()",
    "wait_for_requests_to_drain": "await the requests",
}
"""Attributes of vLLM's classes, each with an alternative or the reason."""
Given = ParamSpec("Given")
Result = TypeVar("Result")


class LLMOptions(TypedDict, total=False):
    """The engine's options, by our names and by vLLM's.

    `pagedray serve --help` explains each of ours, with its default.
    """

    tensor_parallel_size: int
    """Number of ranks, one per device, that the model is sharded over."""
    device: Device | None
    """None selects a GPU if available."""
    dtype: (
        Literal["auto", "half", "fp16", "float16", "bf16", "bfloat16", "float", "fp32", "float32"]
        | None
    )
    """Data type of weights and activations; None and `auto` use that of the checkpoint."""
    task: Task | Literal["pooling"] | None
    runner: Literal["auto", "generate", "pooling"]
    """The same as `task`; `pooling` embeds or scores, whichever the model is for."""
    convert: Literal["auto", "none", "embed"]
    """The same as `task`."""
    quantization: (
        Literal["fp8", "compressed-tensors", "gptq", "awq", "gptq_marlin", "awq_marlin"] | None
    )
    """`fp8` quantizes plain weights while they are loaded; None reads it from the checkpoint."""
    enable_expert_parallel: bool
    """Whether each rank has some whole experts, instead of some columns of every expert."""
    executor: Literal["ray", "local"]
    """`ray` runs each rank as a Ray actor; `local` runs a single rank in this process."""
    num_threads: int | None
    """CPU threads per rank."""
    placement_strategy: PlacementStrategy
    spare_ranks: int | None
    all_reduce: AllReduce
    allow_unauthenticated_ray: bool
    block_size: int
    """Tokens per block."""
    num_blocks: int | None
    """Number of blocks on the device; None is as many as fit in memory."""
    num_cpu_blocks: int | None
    """Number of CPU blocks, for swapping and for prefixes evicted from the device."""
    memory_fraction: float
    """Fraction of device memory for weights, activations and KV cache."""
    enable_prefix_cache: bool
    enable_cpu_prefix_cache: bool
    """Keep prefixes that are evicted from the device in CPU blocks."""
    disk_cache_folder: str
    """Folder for files of prefixes evicted from the CPU blocks."""
    disk_cache_bytes: int
    """Maximum size of these files, for all ranks together."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]
    mamba_ssm_cache_dtype: Literal["auto", "float32", "bfloat16"]
    """Data type of the matrices of recurrent layers; auto is the checkpoint's."""
    max_num_seqs: int | None
    """Maximum number of sequences per step (256, or 1024 on GPUs of 70 GiB or more)."""
    max_num_batched_tokens: int | None
    """Maximum number of tokens per step (2048, or 8192 on GPUs of 70 GiB or more)."""
    max_model_len: int | str | None
    """Context length in tokens, such as 32768, `32K` or `auto`."""
    max_queued_requests: int
    max_queued_tokens: int
    preemption: Preemption
    itl_target_ms: float | None
    """Target for the time between tokens while prompts are processed; None is no limit."""
    load_format: Literal["auto", "dummy", "safetensors"]
    attention_backend: str
    enforce_eager: bool
    """Disable CUDA graphs."""
    max_graph_tokens: int
    load_seed: int
    structure_compile_s: float
    message_special_tokens: MessageSpecialTokens
    chat_template: str | None
    """A file, or the text, of a chat template that replaces the model's."""
    trust_request_chat_template: bool
    """Only affects servers; `chat` always accepts a template."""
    generation_config: str
    """`auto`, `none`, or a folder with a generation_config.json for the default parameters."""
    override_generation_config: dict[str, object] | None
    """Default parameters that take precedence over generation_config.json."""
    speculative_config: dict[str, object] | None
    """How next tokens are guessed, such as {"method": "ngram", "num_speculative_tokens": 4}."""
    revision: str | None
    """Branch, tag or commit of a model on the Hub."""
    tokenizer: str | None
    """Must be the model."""
    tokenizer_revision: str | None
    """Must be the revision of the model."""
    download_dir: str | None
    """Folder of the Hub's cache on each node."""
    hf_overrides: dict[str, object] | None
    """Replacements of fields of config.json."""

    gpu_memory_utilization: float
    """The same as `memory_fraction`."""
    enable_prefix_caching: bool
    """The same as `enable_prefix_cache`."""
    distributed_executor_backend: Literal["ray", "mp", "uni"]
    """The same as `executor`; `uni` selects `local`, and so does `mp` for a single rank."""
    rope_scaling: dict[str, object] | None
    """The same as this field of `hf_overrides`."""
    rope_theta: float | None
    """The same as this field of `hf_overrides`."""
    trust_remote_code: bool
    """Ignored, with a warning: code from checkpoints is never run."""
    swap_space: float
    """Ignored; `num_cpu_blocks` sets the blocks for swapping."""
    disable_log_stats: bool
    """Ignored."""


def with_vllm_arguments(method: Callable[Given, Result]) -> Callable[Given, Result]:
    """Return a method that accepts vLLM's defaults, and names alternatives to other values.

    It raises InvalidRequestError for an argument of vLLM's that would have an effect, and TypeError
    for an argument that vLLM does not have either.
    """

    @functools.wraps(method)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        for name in _REJECTED.keys() & kwargs.keys():
            value = kwargs.pop(name)
            # 0 and 1 would equal False and True.
            if isinstance(value, bool) or value not in _WITHOUT_EFFECT.get(name, (None,)):
                raise invalid_field(name, f"= {quote(value)} is not supported: {_REJECTED[name]}.")
        return method(*args, **kwargs)

    return call


class PublicLLM:
    """Information about `LLM` and `AsyncLLM`, and about vLLM's names that they lack."""

    _CLOSE = "close"

    def __init_subclass__(cls) -> None:
        if not cls.__name__.startswith("Text"):
            # Where users import it from.
            cls.__module__ = "pagedray"
            for member in vars(cls).values():
                if callable(member):
                    member.__module__ = "pagedray"

    def __repr__(self) -> str:
        name = type(self).__name__
        config: EngineConfig | None = vars(self).get("_config")
        if config is None:
            return f"<{name} without a model>"
        parallel = config.parallel
        return (
            f"{name}({config.model.name!r}, device={parallel.device!r}, "
            f"dtype={config.model.dtype!r}, tensor_parallel_size={parallel.tensor_parallel_size}, "
            f"executor={parallel.executor!r})"
        )

    if not TYPE_CHECKING:
        # Type checkers report unknown names by themselves.
        def __getattr__(self, name: str) -> object:
            kind = type(self).__name__
            text = f"{kind!r} object has no attribute {name!r}"
            if name in _MISSING:
                text = f"{text}: {_MISSING[name].format(close=self._CLOSE)}"
            elif not name.startswith("_"):
                nearest = nearest_name(name, [one for one in dir(self) if not one.startswith("_")])
                text = text if nearest is None else f"{text}; did you mean {nearest!r}?"
            raise AttributeError(text)


class ExitClose:
    """Calls `close` when the interpreter exits, unless it is cancelled before.

    The last handler of an exit runs first. Ray, which has registered its own when an engine runs,
    ends the ranks: an engine that still runs would take that for a fault, and start Ray again to
    ask for its cause.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._process_id = os.getpid()
        atexit.register(self._run)

    def cancel(self) -> None:
        """Do nothing at the exit. May be called twice."""
        atexit.unregister(self._run)

    def _run(self) -> None:
        # A fork has the handlers of its parent, but not its threads.
        if os.getpid() == self._process_id:
            self._close()
