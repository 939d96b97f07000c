"""RMSNorm of all queries of a token, and of all its keys, as in OLMo-2."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedray.rank_roofline import WeightWork
from workers.layers.weight import Layer, WeightShard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workers.parallel.group import ParallelGroup

__all__ = ["WholeQKNorm"]


class WholeQKNorm(Layer):
    """RMSNorm over all heads, of which ranks sum their parts: two numbers for each token."""

    def __init__(
        self,
        names: tuple[str, str],
        head_size: int,
        eps: float,
        *,
        num_heads: int,
        num_kv_heads: int,
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`num_heads` and `num_kv_heads` count the heads of all ranks together."""
        self._names = names
        self._eps = eps
        self._dtype = dtype
        self._group = group
        self._totals = (num_heads * head_size, num_kv_heads * head_size)
        local = (num_heads // group.size, max(1, num_kv_heads // group.size))
        # The first KV head of this rank; a head that several ranks hold counts several times.
        firsts = (group.rank * local[0], group.rank * num_kv_heads // group.size)
        self._parts = tuple(
            slice(first * head_size, (first + number) * head_size)
            for first, number in zip(firsts, local, strict=True)
        )
        self._num_queries = local[0]
        self._weight = torch.empty(sum(local), head_size, dtype=torch.float32, device=device)
        sizes = [group.size * number * head_size for number in local]
        self._sizes = torch.tensor(sizes, dtype=torch.float32, device=device)

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Return the norm of `[num_tokens, num_heads + num_kv_heads, head_size]`."""
        heads = heads.to(torch.float32, copy=True)
        squares = heads.square().sum(2)  # [num_tokens, num_heads + num_kv_heads]
        queries = squares[:, : self._num_queries].sum(1)
        keys = squares[:, self._num_queries :].sum(1)
        sums = self._group.all_reduce(torch.stack((queries, keys), dim=1))
        scales = torch.rsqrt(sums / self._sizes + self._eps)
        query_scale, key_scale = scales[:, None].unsqueeze(3).unbind(2)  # [num_tokens, 1, 1]
        heads[:, : self._num_queries].mul_(query_scale)
        heads[:, self._num_queries :].mul_(key_scale)
        return heads.mul_(self._weight).to(self._dtype)

    def weight_work(self) -> WeightWork:
        return WeightWork(num_bytes=self._weight.nbytes)

    def weight_shards(self) -> Iterator[WeightShard]:
        targets = self._weight.split((self._num_queries, len(self._weight) - self._num_queries))
        for name, total, part, target in zip(
            self._names, self._totals, self._parts, targets, strict=True
        ):
            yield WeightShard(
                name=f"{name}.weight",
                shape=(total,),
                part=(part,),
                target=target.view(-1),
                dummy=1.0,
            )
