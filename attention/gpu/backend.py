"""The base class of all backends on a GPU; a subclass declares only how it differs."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import ClassVar

import torch

from attention.abstract import AttentionBackend, AttentionSpec
from attention.gpu import blocks
from attention.gpu.impl import GpuImpl
from attention.gpu.metadata import GpuMetadata, GpuMetadataBuilder
from attention.gpu.state import GpuState, state_class

__all__ = ["GpuBackend"]


class GpuBackend(AttentionBackend):
    """A backend that combines the kernels of a library with the shared kernels."""

    supports_graph_capture = True

    name: ClassVar[str]
    builder_cls: ClassVar[type[GpuMetadataBuilder]]
    packages: ClassVar[dict[str, str]] = {"triton": "triton"}
    """Required packages, by the module to import."""
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    oldest_capability: ClassVar[tuple[int, int] | None] = None
    """Compute capability that the GPU must have; None for any."""
    largest_head_size: ClassVar[int | None] = None

    @classmethod
    def get_name(cls) -> str:
        """Return the name by which the selector knows this backend."""
        return cls.name

    @classmethod
    def get_impl_cls(cls) -> type[GpuImpl]:
        """Return the class of a layer's computation."""
        return GpuImpl

    @classmethod
    def get_metadata_cls(cls) -> type[GpuMetadata]:
        """Return the class of a step's metadata."""
        return GpuMetadata

    @classmethod
    def get_state_cls(cls) -> type[GpuState]:
        """Return the class of a worker's state."""
        return state_class(cls.builder_cls)

    @classmethod
    def get_builder_cls(cls) -> type[GpuMetadataBuilder]:
        """Return the class that builds metadata."""
        return cls.builder_cls

    copy_blocks = staticmethod(blocks.copy_blocks)

    @classmethod
    def _problems(cls, spec: AttentionSpec) -> Iterator[str]:
        for module, package in cls.packages.items():
            if find_spec(module) is None:
                yield f"the package {package} is not installed"
        yield from cls._problems_of_device(spec.device)
        if spec.dtype not in cls.dtypes:
            yield f"dtype is {spec.dtype}, but must be {_alternatives(cls.dtypes)}"
        largest = cls.largest_head_size
        for head_size in sorted({layer.head_size for layer in spec.layers}):
            if largest is not None and head_size > largest:
                yield f"head_size is {head_size}, but must be at most {largest}"

    @classmethod
    def _problems_of_device(cls, device: torch.device) -> Iterator[str]:
        oldest = cls.oldest_capability
        if device.type != "cuda":
            yield f"device is {device.type}, but must be cuda"
        elif not torch.cuda.is_available():
            yield "CUDA is not available on this machine"
        elif oldest is not None and (found := torch.cuda.get_device_capability(device)) < oldest:
            yield (
                f"the GPU has compute capability {found[0]}.{found[1]}, but must have "
                f"{oldest[0]}.{oldest[1]} or later"
            )


def _alternatives(dtypes: Sequence[torch.dtype]) -> str:
    """Return "bfloat16, float16 or float32" of these."""
    *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(others)} or {last}"
