"""The part of FlashInfer that its backend calls, by the dense reference on a CPU.

It rejects arguments that the library does not have, and plans that do not fit what is run.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar

import torch

from attention.params import AttentionParams, AttentionType
from tests.attention.dense_reference import dense_attention


class FakeScratch:
    """Stands for the scratch of a device."""

    @staticmethod
    def for_device(device: torch.device) -> "FakeScratch":
        """Return an object that stands for the scratch of any device."""
        return FakeScratch()

    def at_least(self, num_bytes: int = 0) -> torch.Tensor:
        """Return an unused buffer."""
        return torch.empty(0, dtype=torch.uint8)


class FakeMemory:
    """Stands for the memory of plans, which nothing copies here."""

    def __init__(self, wrapper: Any) -> None:  # Any: the library is untyped
        self._turns = 0

    def turn(self) -> "FakeMemory":
        """Return a context in which a plan is made."""
        self._turns += 1
        return self

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, *error: object) -> None:
        """End."""


class FakeWrapper:
    """The arguments of a plan, which all wrappers have in common."""

    plans: ClassVar[list[str]] = []
    """Which wrappers were planned, and for which version of the kernels."""

    def __init__(self, scratch: torch.Tensor, *, backend: str) -> None:
        assert backend in ("fa2", "fa3")
        self.backend = backend

    def keep(
        self,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        is_causal: bool,
        window_left: int,
        logits_soft_cap: float,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """Record the plan."""
        FakeWrapper.plans.append(f"{type(self).__name__} {self.backend}")
        self.dtypes = q_data_type, kv_data_type
        self.params = AttentionParams(
            num_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_dim,
            scale=sm_scale,
            sliding_window=None if window_left < 0 else window_left + 1,
            soft_cap=logits_soft_cap or None,
            attention_type=AttentionType.DECODER if is_causal else AttentionType.ENCODER_DECODER,
        )

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Compute one sequence."""
        assert (query.dtype, out.dtype) == (self.dtypes[0],) * 2
        if not len(key):
            out.zero_()
        else:
            out.copy_(dense_attention(query, key, value, self.params))


class _Paged(FakeWrapper):
    indptr: torch.Tensor
    indices: torch.Tensor
    last_lens: torch.Tensor

    def keys_and_values(
        self, cache: torch.Tensor, k_scale: float, v_scale: float
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the cached keys and values of each sequence."""
        assert cache.dtype == self.dtypes[1]
        for row, last_len in enumerate(self.last_lens.tolist()):
            first, end = self.indptr[row : row + 2].tolist()
            pages = cache[self.indices[first:end].long()].double()
            length = max(end - first - 1, 0) * cache.shape[2] + last_len
            yield (
                pages[:, 0].flatten(0, 1)[:length] * k_scale,
                (pages[:, 1].flatten(0, 1)[:length] * v_scale),
            )


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    """Decodes."""

    def __init__(
        self,
        scratch: torch.Tensor,
        *,
        use_tensor_cores: bool,
        backend: str,
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        super().__init__(scratch, backend=backend)
        assert use_tensor_cores
        self._is_graph = use_cuda_graph
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            self.indptr = paged_kv_indptr_buffer
            self.indices = paged_kv_indices_buffer
            self.last_lens = paged_kv_last_page_len_buffer

    def workspace_size(self, *args: torch.Tensor, **arguments: Any) -> tuple[int, int]:
        """Return workspace sizes. Any: as in the library."""
        return 0, 64

    def reset_workspace_buffer(self, scratch: torch.Tensor, plans: torch.Tensor) -> None:
        """Ignore the buffers."""

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        *,
        page_size: int,
        **arguments: Any,  # Any: mixed
    ) -> None:
        """Plan any step."""
        # The one query is the last position, so that a window is that of a causal mask.
        self.keep(is_causal=True, **arguments)
        if not self._is_graph:
            self.indptr, self.indices, self.last_lens = indptr, indices, last_page_len

    def run(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        *,
        k_scale: float,
        v_scale: float,
        out: torch.Tensor,
    ) -> None:
        """Attend."""
        for row, (key, value) in enumerate(self.keys_and_values(cache, k_scale, v_scale)):
            self.attend(q[row : row + 1], key, value, out[row : row + 1])


def fast_decode_plan(
    wrapper: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    *,
    page_size: int,
    global_override_indptr_cpu: torch.Tensor,
    **arguments: Any,  # Any: mixed
) -> None:
    """Plan a step whose pages are in the buffers of a graph."""
    assert wrapper.indptr.tolist() == global_override_indptr_cpu.tolist()
    assert wrapper.last_lens.tolist() == last_page_len.tolist()
    wrapper.keep(is_causal=True, **arguments)


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    """Queries of several tokens over the cache."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        *,
        head_dim_qk: int,
        page_size: int,
        causal: bool,
        **arguments: Any,  # Any: mixed
    ) -> None:
        """Plan any step."""
        self.keep(is_causal=causal, head_dim=head_dim_qk, **arguments)
        self.indptr, self.indices = paged_kv_indptr, paged_kv_indices
        self.last_lens, self.starts = paged_kv_last_page_len, qo_indptr.tolist()

    def run(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        *,
        k_scale: float,
        v_scale: float,
        out: torch.Tensor,
    ) -> None:
        """Attend."""
        assert len(q) == self.starts[-1]
        for row, (key, value) in enumerate(self.keys_and_values(cache, k_scale, v_scale)):
            tokens = slice(*self.starts[row : row + 2])
            self.attend(q[tokens], key, value, out[tokens])


class BatchPrefillWithRaggedKVCacheWrapper(FakeWrapper):
    """Queries of several tokens over their own keys."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        *,
        head_dim_qk: int,
        causal: bool,
        **arguments: Any,  # Any: mixed
    ) -> None:
        """Plan any step."""
        self.keep(is_causal=causal, head_dim=head_dim_qk, **arguments)
        assert qo_indptr.tolist() == kv_indptr.tolist()
        self.starts = qo_indptr.tolist()

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor) -> None:
        """Attend."""
        assert len(q) == len(k) == self.starts[-1]
        for first, end in zip(self.starts, self.starts[1:], strict=False):
            self.attend(q[first:end], k[first:end], v[first:end], out[first:end])


def fake_modules() -> dict[str, ModuleType]:
    """Return the modules by name."""
    decode, prefill = ModuleType("flashinfer.decode"), ModuleType("flashinfer.prefill")
    vars(decode).update(
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
        fast_decode_plan=fast_decode_plan,
    )
    vars(prefill).update(
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
        BatchPrefillWithRaggedKVCacheWrapper=BatchPrefillWithRaggedKVCacheWrapper,
    )
    package = ModuleType("flashinfer")
    return {"flashinfer": package, "flashinfer.decode": decode, "flashinfer.prefill": prefill}
