"""The gated MLP: `down(silu(gate(x)) * up(x))`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.layers.linear import ColumnParallelLinear, Columns, RowParallelLinear

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from workers.layers.weight import WeightSlot
    from workers.parallel import ParallelGroup

__all__ = ["GatedMLP"]


class GatedMLP:
    """Gate and up are spread by columns, down by rows; one all-reduce at the end."""

    def __init__(
        self,
        name: str,
        *,
        hidden_size: int,
        intermediate_size: int,
        has_bias: bool,
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        local = intermediate_size // group.size
        assert local * group.size == intermediate_size
        part = slice(group.rank * local, (group.rank + 1) * local)
        # One product, then two operations: on the CPU no slower than two products of oneDNN that
        # apply SiLU and multiplication as they store, and 7% of a step faster in float32.
        self._gate_up = ColumnParallelLinear(
            hidden_size,
            [
                Columns(name=f"{name}.{layer}", total=intermediate_size, part=part)
                for layer in ("gate_proj", "up_proj")
            ],
            has_bias=has_bias,
            dtype=dtype,
            device=device,
        )
        self._down = RowParallelLinear(
            f"{name}.down_proj",
            intermediate_size,
            hidden_size,
            has_bias=has_bias,
            group=group,
            dtype=dtype,
            device=device,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`."""
        return self._down(self._gate_up.gated(x))

    def slots(self) -> Iterator[WeightSlot]:
        """Yield the weights of all three layers."""
        yield from self._gate_up.slots()
        yield from self._down.slots()

    def finalize(self) -> None:
        """Bring the weights into the form that is multiplied with."""
        self._gate_up.finalize()
        self._down.finalize()
