"""Methods of vLLM's classes, and arguments of these, that `LLM` and `AsyncLLM` do not have."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from pagedray.errors import InvalidRequestError
from pagedray.text import nearest_name, quote

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pagedray.config import EngineConfig

__all__ = ["PublicLLM", "with_vllm_arguments"]

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
"""Arguments, and what to use instead or why not."""
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
"""Attributes of vLLM's classes, and what to use instead or why not."""

Given = ParamSpec("Given")
Result = TypeVar("Result")


def with_vllm_arguments(method: Callable[Given, Result]) -> Callable[Given, Result]:
    """Return a method that accepts vLLM's defaults, and says what to use for other values.

    It raises InvalidRequestError for an argument of vLLM's that would have an effect, and TypeError
    for one that vLLM does not have either.
    """

    @functools.wraps(method)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        for name in _REJECTED.keys() & kwargs.keys():
            value = kwargs.pop(name)
            # 0 and 1 would equal False and True.
            if isinstance(value, bool) or value not in _WITHOUT_EFFECT.get(name, (None,)):
                raise InvalidRequestError(
                    f"{name} = {quote(value)} is not supported: {_REJECTED[name]}.",
                    param=name,
                )
        return method(*args, **kwargs)

    return call


class PublicLLM:
    """What `LLM` and `AsyncLLM` say about themselves, and about names of vLLM's that they lack."""

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
