"""What the backends on a GPU have in common, so that each says no more than what is its own.

The classes of a backend are named in one place each: by the backend its layer and its state, by the
state the builder, and by the builder the metadata.
"""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import ClassVar

import torch

from attention.abstract import AttentionBackend, AttentionSpec
from attention.gpu import blocks
from attention.gpu.impl import GpuImpl
from attention.gpu.metadata import GpuMetadata, GpuMetadataBuilder
from attention.gpu.state import GpuState

__all__ = ["GpuBackend"]


class GpuBackend(AttentionBackend):
    """A backend whose kernels are a library's or the shared ones; a subclass names its parts."""

    supports_graph_capture = True

    name: ClassVar[str]
    """By which the selector knows it."""
    impl_cls: ClassVar[type[GpuImpl]]
    state_cls: ClassVar[type[GpuState]]
    packages: ClassVar[dict[str, str]] = {"triton": "triton"}
    """What must be installed: the package of each module."""
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    oldest_capability: ClassVar[tuple[int, int] | None] = None
    """Of the GPU; None for any."""

    @classmethod
    def get_name(cls) -> str:
        """Return the name by which the selector knows this backend."""
        return cls.name

    @classmethod
    def get_impl_cls(cls) -> type[GpuImpl]:
        """Return the class of a layer's computation."""
        return cls.impl_cls

    @classmethod
    def get_metadata_cls(cls) -> type[GpuMetadata]:
        """Return the class of a step's metadata."""
        return cls.get_builder_cls().metadata_cls

    @classmethod
    def get_state_cls(cls) -> type[GpuState]:
        """Return the class of a worker's state."""
        return cls.state_cls

    @classmethod
    def get_builder_cls(cls) -> type[GpuMetadataBuilder]:
        """Return the class that builds metadata."""
        return cls.state_cls.builder_cls

    copy_blocks = staticmethod(blocks.copy_blocks)

    @classmethod
    def _refusals(cls, spec: AttentionSpec) -> Iterator[str]:
        for module, package in cls.packages.items():
            if find_spec(module) is None:
                yield f"the package {package} is not installed"
        yield from cls._refusals_of_device(spec.device)
        if spec.dtype not in cls.dtypes:
            yield f"dtype is {spec.dtype}, but must be {_alternatives(cls.dtypes)}"

    @classmethod
    def _refusals_of_device(cls, device: torch.device) -> Iterator[str]:
        oldest = cls.oldest_capability
        if device.type != "cuda":
            yield f"device is {device.type}, but must be cuda"
        elif not torch.cuda.is_available():
            yield "there is no CUDA device"
        elif oldest is not None and (found := torch.cuda.get_device_capability(device)) < oldest:
            yield (
                f"the GPU has compute capability {found[0]}.{found[1]}, but must have "
                f"{oldest[0]}.{oldest[1]} or later"
            )


def _alternatives(dtypes: Sequence[torch.dtype]) -> str:
    """Return "bfloat16, float16 or float32" of these."""
    *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(others)} or {last}"
