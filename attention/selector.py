"""Chooses a backend by name and configuration, before any library is loaded."""

from collections.abc import Sequence
from importlib import import_module

from attention.abstract import AttentionBackend, AttentionSpec

__all__ = ["AUTO", "BACKEND_NAMES", "select_backend"]

AUTO = "auto"

# In the order in which "auto" tries them, fastest first. The modules import their libraries later.
_BACKENDS = {
    "hybrid": ("attention.flashinfer.hybrid_backend", "HybridBackend"),
    "torch_sdpa": ("attention.cpu.torch_sdpa", "TorchSDPABackend"),
    "flashinfer": ("attention.flashinfer.backend", "FlashInferBackend"),
    "xformers": ("attention.xformers.backend", "XFormersBackend"),
}

# What stands for a name on a GPU, if it is not the same as on a CPU.
_ON_GPU = {"torch_sdpa": ("attention.gpu.torch_sdpa", "TorchSDPAGpuBackend")}

BACKEND_NAMES = (AUTO, *_BACKENDS)


def select_backend(name: str, spec: AttentionSpec) -> type[AttentionBackend]:
    """Return the backend of a name, or for "auto" the first that accepts the configuration.

    A refusal is a ValueError that gives every reason, and the backends that would do.
    """
    if name != AUTO:
        reasons = _reasons(name, spec)
        if not reasons:
            return _load(name, spec)
        others = [other for other in _BACKENDS if other != name and not _reasons(other, spec)]
        raise ValueError(f"{_refusal(name, reasons)} {_alternatives(others)}")
    refused = []
    for candidate in _BACKENDS:
        reasons = _reasons(candidate, spec)
        if not reasons:
            return _load(candidate, spec)
        refused.append(_refusal(candidate, reasons))
    raise ValueError(f"No attention backend serves this configuration. {' '.join(refused)}")


def _reasons(name: str, spec: AttentionSpec) -> Sequence[str]:
    if name not in _BACKENDS:
        return ["there is no such backend"]
    return _load(name, spec).check(spec)


def _load(name: str, spec: AttentionSpec) -> type[AttentionBackend]:
    is_gpu = spec.device.type == "cuda"
    module, cls = _ON_GPU[name] if is_gpu and name in _ON_GPU else _BACKENDS[name]
    backend: type[AttentionBackend] = getattr(import_module(module), cls)
    return backend


def _refusal(name: str, reasons: Sequence[str]) -> str:
    return f"Attention backend {name!r} refuses: {'; '.join(reasons)}."


def _alternatives(names: Sequence[str]) -> str:
    if not names:
        return "No other backend serves this configuration."
    return f"Backends that serve this configuration: {', '.join(names)}."
