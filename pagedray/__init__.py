"""PagedRay: large language model serving on Ray with a paged KV cache.

Public names are loaded lazily, so that importing this package imports neither torch nor Ray.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pagedray.version import __version__

if TYPE_CHECKING:
    from cluster.llm.async_llm import AsyncLLM
    from cluster.llm.generation import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from cluster.llm.llm import LLM, Completion, Generation
    from cluster.llm.sampling_params import RequestOutputKind, SamplingParams
    from cluster.serving.ray_serve.deployment import build_app
    from cluster.serving.ray_serve.llm import PagedRayLLM
    from pagedray.errors import PagedRayError
    from pagedray.request import FinishReason
    from pagedray.sampling_params import Structure

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "Completion",
    "FinishReason",
    "Generation",
    "PagedRayError",
    "PagedRayLLM",
    "RequestOutputKind",
    "SamplingParams",
    "Structure",
    "__version__",
    "build_app",
]

_HOMES = {
    "AsyncLLM": "cluster.llm.async_llm",
    "LLM": "cluster.llm.llm",
    "BeamSearchOutput": "cluster.llm.generation",
    "BeamSearchParams": "cluster.llm.generation",
    "BeamSearchSequence": "cluster.llm.generation",
    "Completion": "cluster.llm.generation",
    "Generation": "cluster.llm.generation",
    "FinishReason": "pagedray.request",
    "PagedRayError": "pagedray.errors",
    "RequestOutputKind": "cluster.llm.sampling_params",
    "SamplingParams": "cluster.llm.sampling_params",
    "Structure": "pagedray.sampling_params",
    "PagedRayLLM": "cluster.serving.ray_serve.llm",
    "build_app": "cluster.serving.ray_serve.deployment",
}
_VLLM_NAMES = {
    **dict.fromkeys(
        ("AsyncEngineArgs", "EngineArgs"),
        "pass the options to LLM or AsyncLLM as keyword arguments",
    ),
    **dict.fromkeys(("AsyncLLMEngine", "LLMEngine"), "use AsyncLLM"),
    **dict.fromkeys(("GuidedDecodingParams", "StructuredOutputsParams"), "use Structure"),
    **dict.fromkeys(("PoolingParams", "PoolingOutput"), "use embed() and score() of LLM"),
    **dict.fromkeys(
        ("PromptType", "TextPrompt", "TokensPrompt"),
        "a prompt is a text, a list of token ids, or a dictionary with one of them",
    ),
    "CompletionOutput": "use Completion",
    "RequestOutput": "use Generation",
}
_NEIGHBORS = ("attention", "cluster", "workers")


def __getattr__(name: str) -> object:
    if name in _VLLM_NAMES:
        # The message of an AttributeError would be lost in `from pagedray import NAME`.
        raise ImportError(f"pagedray has no {name}: {_VLLM_NAMES[name]}.", name=__name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _check_neighbors() -> None:
    # The packages beside this package have common names: a user's own `cluster` that comes first on
    # the path would shadow ours.
    root = Path(__file__).resolve().parent.parent
    for name in _NEIGHBORS:
        spec = find_spec(name)
        found = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        expected = root / name / "__init__.py"
        if found != expected:
            raise ImportError(
                f"pagedray needs the package {name!r} at {expected}, but {found} shadows it."
            )


_check_neighbors()
