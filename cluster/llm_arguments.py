"""Arguments that vLLM's methods have and those of `LLM` and `AsyncLLM` do not."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from pagedray.errors import InvalidRequestError
from pagedray.wording.shown_value import shown_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["with_vllm_arguments"]

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
    "chat_template_content_format": (None, "auto", "string"),
    "priority": (None, 0),
}
"""Values that ask for nothing, if it is not only None."""

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
                    f"{name} = {shown_value(value)} is not supported: {_REJECTED[name]}.",
                    param=name,
                )
        return method(*args, **kwargs)

    return call
