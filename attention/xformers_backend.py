"""The backend on xFormers, and on our own kernels for what xFormers lacks.

Neither is imported before a builder is made: whether the backend can be used at all is asked
where they are not installed.
"""

import logging
from collections.abc import Iterator
from importlib.util import find_spec

import torch

from attention.abstract import AttentionBackend, AttentionBatch, AttentionParams, AttentionSpec
from attention.gpu_group import GpuGroup
from attention.gpu_impl import GpuImpl
from attention.gpu_metadata import GpuMetadata, GpuMetadataBuilder
from attention.gpu_state import GpuState
from attention.unified_op import define_op
from attention.xformers_cells import why_decode_is_shared, why_prefill_is_shared

__all__ = [
    "XFormersBackend",
    "XFormersImpl",
    "XFormersMetadata",
    "XFormersMetadataBuilder",
    "XFormersState",
]

logger = logging.getLogger(__name__)

_OLDEST_CAPABILITY = (8, 0)


class XFormersMetadata(GpuMetadata):
    """One step."""


class XFormersMetadataBuilder(GpuMetadataBuilder):
    """Builds metadata whose groups have xFormers and the shared kernels."""

    def build(self, batch: AttentionBatch) -> XFormersMetadata:
        """Return the metadata of one step; the one built before is no longer valid."""
        return XFormersMetadata(batch, self)

    def log_servers(self) -> None:
        """Say which cells of which layers the shared kernels serve, and why."""
        layers: dict[AttentionParams, list[int]] = {}
        for index, params in enumerate(self._spec.layers):
            layers.setdefault(params.plan_key, []).append(index)
        for params, indices in layers.items():
            lacks = {"prefills": why_prefill_is_shared(params)}
            if params.is_cached:
                lacks["decodes"] = why_decode_is_shared(params, self._spec)
            for cell, reason in lacks.items():
                server = "xFormers serves" if reason is None else "The shared kernels serve"
                because = "" if reason is None else f", for xFormers lacks {reason}"
                logger.info("%s %s of layers %s%s.", server, cell, indices, because)

    def _make_group(self, params: AttentionParams, *, is_graph: bool) -> GpuGroup:
        # Imported where it is used, as it needs Triton and the library.
        from attention.xformers_group import XFormersGroup

        return XFormersGroup(params, self._spec, is_graph=is_graph)


class XFormersState(GpuState):
    """What a worker keeps for captured graphs."""

    builder_cls = XFormersMetadataBuilder


class XFormersImpl(GpuImpl):
    """One layer's attention."""

    op = define_op("unified_xformers")


class XFormersBackend(AttentionBackend):
    """Attention by xFormers on a GPU."""

    supports_graph_capture = True

    @staticmethod
    def get_name() -> str:
        """Return the name by which the selector knows this backend."""
        return "xformers"

    @staticmethod
    def get_impl_cls() -> type[XFormersImpl]:
        """Return the class of a layer's computation."""
        return XFormersImpl

    @staticmethod
    def get_metadata_cls() -> type[XFormersMetadata]:
        """Return the class of a step's metadata."""
        return XFormersMetadata

    @staticmethod
    def get_state_cls() -> type[XFormersState]:
        """Return the class of a worker's state."""
        return XFormersState

    @staticmethod
    def get_builder_cls() -> type[XFormersMetadataBuilder]:
        """Return the class that builds metadata."""
        return XFormersMetadataBuilder

    @classmethod
    def make_metadata_builder(cls, spec: AttentionSpec) -> XFormersMetadataBuilder:
        """Return a builder, and log who serves which layers; a worker keeps one."""
        builder = XFormersMetadataBuilder(spec)
        builder.log_servers()
        return builder

    @classmethod
    def _refusals(cls, spec: AttentionSpec) -> Iterator[str]:
        if find_spec("xformers") is None:
            yield "the package xformers is not installed"
        if find_spec("triton") is None:
            yield "the package triton is not installed"
        if spec.device.type != "cuda":
            yield f"device is {spec.device.type}, but must be cuda"
        elif not torch.cuda.is_available():
            yield "there is no CUDA device"
        elif (capability := torch.cuda.get_device_capability(spec.device)) < _OLDEST_CAPABILITY:
            yield (
                f"the GPU has compute capability {capability[0]}.{capability[1]}, but must have "
                f"{_OLDEST_CAPABILITY[0]}.{_OLDEST_CAPABILITY[1]} or later"
            )
        if spec.dtype not in (torch.bfloat16, torch.float16):
            yield f"dtype is {spec.dtype}, but must be bfloat16 or float16"
