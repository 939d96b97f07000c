"""Chooses a backend by name and configuration, before any kernel library is loaded."""

from collections.abc import Sequence

from attention.abstract import AttentionBackend, AttentionSpec
from attention.cpu.torch_sdpa import TorchSDPABackend
from attention.gpu_backends import (
    FlashInferBackend,
    HybridBackend,
    TorchSDPAGpuBackend,
    XFormersBackend,
)

__all__ = ["AUTO", "BACKEND_NAMES", "select_backend"]

AUTO = "auto"

# In the order in which "auto" tries them, fastest first.
_ON_GPU: dict[str, type[AttentionBackend]] = {
    backend.name: backend
    for backend in (HybridBackend, TorchSDPAGpuBackend, FlashInferBackend, XFormersBackend)
}
_ON_CPU: dict[str, type[AttentionBackend]] = {
    **_ON_GPU,
    TorchSDPABackend.get_name(): TorchSDPABackend,
}

BACKEND_NAMES = (AUTO, *_ON_GPU)


def select_backend(name: str, spec: AttentionSpec) -> type[AttentionBackend]:
    """Return the backend of a name, or for "auto" the first that supports the configuration.

    Otherwise raise a ValueError with every reason and the backends that support it.
    """
    backends = _ON_GPU if spec.device.type == "cuda" else _ON_CPU
    if name in backends and not (backend := backends[name]).check(spec):
        return backend
    reasons = {other: "; ".join(backend.check(spec)) for other, backend in backends.items()}
    supported = [other for other, problems in reasons.items() if not problems]
    if name == AUTO and supported:
        return backends[supported[0]]
    if name == AUTO:
        each = " ".join(f"{other}: {problems}." for other, problems in reasons.items())
        raise ValueError(f"No attention backend supports this configuration. {each}")
    problem = f"Unknown attention backend {name!r}."
    if name in reasons:
        problem = (
            f"Attention backend {name!r} does not support this configuration: {reasons[name]}."
        )
    raise ValueError(f"{problem} {_alternatives(supported)}")


def _alternatives(names: Sequence[str]) -> str:
    if not names:
        return "No other backend supports this configuration."
    return f"Backends that support this configuration: {', '.join(names)}."
