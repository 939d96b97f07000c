"""The router, and the weighted sum of experts.

An expert is `down(activation(gate(x)) * up(x))`, or without a gate `down(activation(up(x)))`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from attention.kernels.arguments import DeferredRMSNorm, ExpertWeights, SigmoidScores
from pagedray.model_config import ExpertsConfig
from pagedray.weight_format import MXFP4_BLOCK_SIZE, Fp8Format
from workers.layers.activation import activation_function, clamped_gate
from workers.layers.formats.fp8_weight import Fp8Weight
from workers.layers.formats.mxfp4 import Mxfp4Matrix, dequantized_mxfp4
from workers.layers.linear_choice import linear_kernel_class, make_exact_kernel, make_linear_kernel
from workers.layers.weight import Layer, Placement, WeightShard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedray.model_config import Activation
    from pagedray.rank_roofline import WeightWork
    from workers.layers.linear_kernel import LinearKernel

__all__ = [
    "Choice",
    "DequantizedExperts",
    "ExpertPart",
    "ExpertProduct",
    "GroupedExperts",
    "LinearExperts",
    "Mxfp4Experts",
    "Router",
    "SigmoidRouter",
    "make_expert_product",
    "product_class",
]


_ALIGNMENT = 8
_MAX_STACKED_ROWS = 512
"""For more rows, the products of stacked experts are computed by themselves."""


class ExpertProduct(ABC):
    """The weights of a rank's experts, and the sum of their outputs.

    The result of a row does not depend on the other rows, except for rounding in a library.
    """

    @abstractmethod
    def __init__(self, part: ExpertPart) -> None:
        """Allocate the weights of a rank's part."""

    @abstractmethod
    def gate_up(self, expert: int) -> torch.Tensor | Mxfp4Matrix | Fp8Weight:
        """Return where the gate and up projection of the rank's expert of this index are loaded.

        The shape is `ExpertPart.gate_up_shape`.
        """

    @abstractmethod
    def gate_up_bias(self, expert: int) -> torch.Tensor | None:
        """Return where their biases are loaded, one for each output."""

    @abstractmethod
    def down(self, expert: int) -> torch.Tensor | Mxfp4Matrix | Fp8Weight:
        """Return where its down projection is loaded, `[hidden_size, intermediate_size]`."""

    @abstractmethod
    def down_bias(self, expert: int) -> torch.Tensor | None:
        """Return the target of the bias, `[hidden_size]`, if this rank adds the bias."""

    @abstractmethod
    def __call__(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        """Return the weighted sums over the rank's experts, `[num_tokens, hidden_size]`."""

    def forward_residual(
        self, stream: torch.Tensor, x: torch.Tensor, choice: Choice
    ) -> torch.Tensor | None:
        """Add the sums to the stream, in place, if one kernel does both; else return them."""
        return self(x, choice)

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """The bytes of all weights and biases; must be read after `finalize`."""

    @abstractmethod
    def finalize(self) -> None:
        """Convert the loaded weights into the layout of the kernels."""


class LinearExperts(ExpertProduct):
    """Computes one expert after the other with the kernels of linear layers, for CPUs."""

    def __init__(self, part: ExpertPart) -> None:
        def kernels(shape: tuple[int, int], *, has_bias: bool) -> list[LinearKernel]:
            return [
                make_linear_kernel(*shape, has_bias=has_bias, dtype=part.dtype, device=part.device)
                for _ in range(part.num_stored)
            ]

        self._num_experts = part.config.num_experts + part.config.num_stacked
        self._experts = [*part.experts, *range(part.config.num_experts, self._num_experts)]
        self._gate = part.config.gate
        self._activation = part.config.activation
        self._gate_up = kernels(part.gate_up_shape, has_bias=part.config.has_bias)
        self._down = kernels(part.down_shape, has_bias=part.has_output_bias)

    def gate_up(self, expert: int) -> torch.Tensor:
        return self._gate_up[expert].weight

    def gate_up_bias(self, expert: int) -> torch.Tensor | None:
        return self._gate_up[expert].bias

    def down(self, expert: int) -> torch.Tensor:
        return self._down[expert].weight

    def down_bias(self, expert: int) -> torch.Tensor | None:
        return self._down[expert].bias

    def __call__(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        chosen = choice.experts.flatten()
        # Pairs of a token and an expert, sorted by expert.
        pairs = chosen.argsort(stable=True)
        tokens = pairs // choice.experts.shape[1]
        weights = choice.weights.flatten()[pairs, None]
        ends = chosen.bincount(minlength=self._num_experts).cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        sums = x.new_zeros(x.shape, dtype=torch.float32)
        for index, expert in enumerate(self._experts):
            part = slice(starts[expert], ends[expert])
            if part.start == part.stop:
                continue
            inner = self._inner(index, x[tokens[part]])
            # A token's outputs are added in the order of experts, whatever the other tokens are.
            sums.index_add_(0, tokens[part], self._down[index](inner) * weights[part])
        return sums.to(x.dtype)

    @property
    def num_bytes(self) -> int:
        return sum(kernel.num_bytes for kernel in (*self._gate_up, *self._down))

    def finalize(self) -> None:
        for kernel in (*self._gate_up, *self._down):
            kernel.finalize()

    def _inner(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the input of an expert's down projection."""
        if self._gate is not None:
            return clamped_gate(self._gate_up[index](rows), self._gate)
        return _inner(self._gate_up[index], rows, self._activation)


class StackedExperts(ExpertProduct):
    """Computes all experts at once with grouped GEMMs, for GPUs."""

    def __init__(self, part: ExpertPart) -> None:
        def biases(shape: tuple[int, int]) -> torch.Tensor:
            return torch.empty(part.num_stored, shape[0], dtype=part.dtype, device=part.device)

        self._first_expert = part.experts.start
        self._num_stacked = part.config.num_stacked
        self._gate = part.config.gate
        self._activation = part.config.activation
        self._gate_up_bias = biases(part.gate_up_shape) if part.config.has_bias else None
        self._down_bias = biases(part.down_shape) if part.has_output_bias else None
        self._stored: ExpertWeights | None = None
        """The weights that the kernels read; None before `finalize`."""
        self._others: ExpertWeights | None = None
        """Those of all experts but the stacked ones."""
        self._stacked: list[tuple[LinearKernel, torch.Tensor]] = []
        """The input and output projections of the stacked experts."""
        self._has_shared_gate = part.config.has_shared_gate
        self._allocate(part)

    @abstractmethod
    def _allocate(self, part: ExpertPart) -> None:
        """Allocate where the weights of both projections are loaded."""

    @property
    def num_bytes(self) -> int:
        assert self._stored is not None
        return self._stored.num_bytes

    def gate_up_bias(self, expert: int) -> torch.Tensor | None:
        return None if self._gate_up_bias is None else self._gate_up_bias[expert]

    def down_bias(self, expert: int) -> torch.Tensor | None:
        return None if self._down_bias is None else self._down_bias[expert]

    def __call__(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        return self._sums(x, choice, None)

    def forward_residual(self, stream: torch.Tensor, x: torch.Tensor, choice: Choice) -> None:
        self._sums(x, choice, stream)

    def _sums(self, x: torch.Tensor, choice: Choice, stream: torch.Tensor | None) -> torch.Tensor:
        """Return the sums, or the stream that they were added to."""
        # Triton is absent on machines without a GPU.
        from attention.kernels.triton.experts import expert_sums

        experts, weights = choice
        if not self._num_stacked or len(x) <= _MAX_STACKED_ROWS:
            assert self._stored is not None
            return expert_sums(x, experts, weights, self._stored, stream=stream)
        # Products that all rows share are faster by themselves.
        assert self._others is not None
        num_chosen = experts.shape[1] - self._num_stacked
        out = expert_sums(
            x, experts[:, :num_chosen], weights[:, :num_chosen], self._others, stream=stream
        )
        for index, (kernel, down) in enumerate(self._stacked, start=num_chosen):
            inner = _inner(kernel, x, self._activation)
            if self._has_shared_gate:
                inner.mul_(weights[:, index, None].to(x.dtype))
            out.addmm_(inner, down.t())
        return out

    def _store(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        gate_up_scales: torch.Tensor | None = None,
        down_scales: torch.Tensor | None = None,
    ) -> None:
        """Keep the weights in the layouts of the kernels."""
        self._stored = ExpertWeights(
            first_expert=self._first_expert,
            gate_up=gate_up,
            down=down,
            gate_up_scales=gate_up_scales,
            down_scales=down_scales,
            gate_up_bias=self._gate_up_bias,
            down_bias=self._down_bias,
            clamp=None if self._gate is None else (self._gate.alpha, self._gate.limit),
            activation=self._activation,
        )
        if self._num_stacked:
            num_others = len(gate_up) - self._num_stacked
            others = slice(num_others)
            self._others = replace(self._stored, gate_up=gate_up[others], down=down[others])
            kind = linear_kernel_class(gate_up.dtype, gate_up.device)
            kernels = [kind(weight, None) for weight in gate_up[num_others:]]
            self._stacked = list(zip(kernels, down[num_others:], strict=True))


class GroupedExperts(StackedExperts):
    """Experts with weights in the dtype of the rows."""

    def _allocate(self, part: ExpertPart) -> None:
        self._gate_up, self._down = (
            torch.empty(part.num_stored, *shape, dtype=part.dtype, device=part.device)
            for shape in (part.gate_up_shape, part.down_shape)
        )

    def gate_up(self, expert: int) -> torch.Tensor:
        return self._gate_up[expert]

    def down(self, expert: int) -> torch.Tensor:
        return self._down[expert]

    def finalize(self) -> None:
        self._store(self._gate_up, self._down)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPart:
    """Some columns of every expert, or some whole experts."""

    config: ExpertsConfig
    """Of all ranks together."""
    experts: range
    """The experts of this rank."""
    hidden_size: int
    intermediate_size: int
    """Of each expert on this rank."""
    has_output_bias: bool
    """Whether this rank adds the biases of outputs."""
    dtype: torch.dtype
    """Of the rows that are multiplied."""
    device: torch.device
    fp8: Fp8Format | None = None
    """How weights are stored in fp8; None otherwise."""

    @property
    def num_stored(self) -> int:
        """The experts of this rank, and the stacked ones."""
        return len(self.experts) + self.config.num_stacked

    @property
    def gate_up_shape(self) -> tuple[int, int]:
        """The outputs and inputs of an expert's gate, if it has one, and up projection."""
        return self.config.num_inputs * self.intermediate_size, self.hidden_size

    @property
    def down_shape(self) -> tuple[int, int]:
        """The outputs and inputs of its down projection."""
        return self.hidden_size, self.intermediate_size


class Choice(NamedTuple):
    """The experts of some tokens, the stacked ones last."""

    experts: torch.Tensor
    """Their indices, `[num_tokens, num_chosen + num_stacked]` int64, or int32 on a GPU."""
    weights: torch.Tensor
    """The weights of their outputs, `[num_tokens, num_chosen + num_stacked]` float32."""


class Router(Layer):
    """Chooses the experts of the highest softmax; all ranks compute it, with the same result."""

    def __init__(
        self,
        name: str,
        factors_name: str | None,
        experts: ExpertsConfig,
        place: Placement,
        *,
        hidden_size: int,
        gate_name: str = "",
    ) -> None:
        """The tensor of factors, if there is one, multiplies the weights of chosen experts.

        `gate_name` is the layer of the gate of stacked experts, if they have a gate.
        """
        self._name = name
        self._gate_name = gate_name
        self._num_stacked = experts.num_stacked
        self._has_gate = experts.num_stacked > 0 and experts.has_shared_gate
        self._num_experts = experts.num_experts
        self._factors_name = factors_name
        self._factors = None
        if factors_name is not None:
            self._factors = torch.empty(
                experts.num_experts, dtype=torch.float32, device=place.device
            )
        self._num_columns = experts.num_experts + self._has_gate
        # Of an odd number of columns, cuBLAS computes a product in more than twice the time.
        out_size = -(-self._num_columns // _ALIGNMENT) * _ALIGNMENT if self._has_gate else None
        self._shape = (out_size or self._num_columns, hidden_size)
        self._num_chosen = experts.num_chosen
        self._is_renormalized = experts.is_renormalized
        self._sigmoid: SigmoidScores | None = None
        """How sigmoids choose, if they do."""
        self._has_kernel = True
        """Whether a GPU chooses in one kernel."""
        self._kernel = make_linear_kernel(
            *self._shape, has_bias=experts.has_bias, dtype=place.dtype, device=place.device
        )
        self._kernel.weight[self._num_columns :].zero_()

    def __call__(self, x: torch.Tensor) -> Choice:
        """Return the experts of each of `[num_tokens, hidden_size]`."""
        return self._choice(self._logits(x))

    def accepts_deferred_norm(self, num_rows: int) -> bool:
        """Return whether `with_norm` accepts this number of rows."""
        return self._kernel.accepts_deferred_norm(num_rows)

    def with_norm(self, row: DeferredRMSNorm) -> tuple[torch.Tensor, Choice]:
        """Return the norm of a row, and its experts."""
        normed = torch.empty_like(row.stream)
        return normed, self._choice(self._kernel.forward_with_norm(row, normed))

    def _choice(self, logits: torch.Tensor) -> Choice:
        logits = logits[:, : self._num_columns]
        if logits.is_cuda and self._has_kernel:
            # Triton is absent on machines without a GPU.
            from attention.kernels.triton.experts import choose_experts

            return Choice(
                *choose_experts(
                    logits,
                    self._num_chosen,
                    is_renormalized=self._is_renormalized,
                    factors=self._factors,
                    sigmoid=self._sigmoid,
                    num_stacked=self._num_stacked,
                    has_gate=self._has_gate,
                )
            )
        experts, weights = self._chosen(logits[:, : self._num_experts])
        if self._num_stacked:
            shape = len(logits), self._num_stacked
            stacked = self._num_experts + torch.arange(self._num_stacked, device=logits.device)
            gates = weights.new_ones(shape)
            if self._has_gate:
                gates = logits[:, self._num_experts :].float().sigmoid().expand(shape)
            experts = torch.cat((experts, stacked.expand(shape)), dim=1)
            weights = torch.cat((weights, gates), dim=1)
        return Choice(experts.int() if experts.is_cuda else experts, weights)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernel(x)

    def _chosen(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts that logits choose, and their weights."""
        probabilities = logits.softmax(1, dtype=torch.float32)
        weights, experts = probabilities.topk(self._num_chosen, dim=1)
        if self._is_renormalized:
            weights = weights / weights.sum(1, keepdim=True)
        if self._factors is not None:
            weights = weights * self._factors[experts]
        return experts, weights

    def weight_shards(self) -> Iterator[WeightShard]:
        weight, num_experts = self._kernel.weight, self._num_experts
        yield WeightShard.whole(f"{self._name}.weight", weight[:num_experts])
        if self._has_gate:
            gate = weight[num_experts : self._num_columns]
            yield WeightShard.whole(f"{self._gate_name}.weight", gate)
        if self._kernel.bias is not None:
            yield WeightShard.whole(f"{self._name}.bias", self._kernel.bias)
        if self._factors is not None:
            assert self._factors_name is not None
            yield WeightShard.whole(self._factors_name, self._factors, dummy=1.0)

    def finalize(self) -> None:
        self._kernel.finalize()

    def weight_work(self) -> WeightWork:
        return self._kernel.work(*self._shape)


class SigmoidRouter(Router):
    """Chooses the experts of the highest sigmoids; a bias may take part in the choice alone."""

    def __init__(
        self,
        name: str,
        bias_name: str,
        experts: ExpertsConfig,
        place: Placement,
        *,
        hidden_size: int,
        gate_name: str = "",
    ) -> None:
        if experts.has_exact_router:
            place = replace(place, dtype=torch.float32)
        super().__init__(name, None, experts, place, hidden_size=hidden_size, gate_name=gate_name)
        self._groups = experts.num_groups, experts.num_chosen_groups
        self._has_kernel = experts.num_groups == 1
        self._bias_name = bias_name
        self._scale, self._sum_eps = experts.weight_scale, experts.sum_eps
        self._bias = None
        if experts.has_choice_bias:
            self._bias = torch.empty(experts.num_experts, dtype=torch.float32, device=place.device)
        self._sigmoid = SigmoidScores(bias=self._bias, scale=self._scale, sum_eps=self._sum_eps)
        self._dtype: torch.dtype | None = place.dtype
        """The dtype of the product's rows; None for any."""
        exact = None
        if place.dtype == torch.float32:
            exact = make_exact_kernel(*self._shape, has_bias=experts.has_bias, device=place.device)
        if exact is not None:
            self._kernel, self._dtype = exact, None

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernel(x if self._dtype is None else x.to(self._dtype))

    def _chosen(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.sigmoid().float()
        biased = scores if self._bias is None else scores + self._bias
        if self._groups[0] > 1:
            biased = self._in_best_groups(biased)
        experts = biased.topk(self._num_chosen, dim=1).indices
        weights = scores.gather(1, experts)
        if self._is_renormalized:
            weights = weights / (weights.sum(1, keepdim=True) + self._sum_eps)
        return experts, weights * self._scale

    def _in_best_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """Return scores with -inf in all groups but those with the highest sums of two scores."""
        num_groups, num_chosen = self._groups
        groups = scores.unflatten(1, (num_groups, -1))
        sums = groups.topk(2, dim=2).values.sum(2)
        chosen = sums.topk(num_chosen, dim=1).indices
        is_other = torch.ones_like(sums, dtype=torch.bool).scatter_(1, chosen, False)
        chosen_scores: torch.Tensor = groups.masked_fill(is_other.unsqueeze(2), float("-inf"))
        return chosen_scores.flatten(1)

    def weight_shards(self) -> Iterator[WeightShard]:
        yield from super().weight_shards()
        if self._bias is not None:
            yield WeightShard.whole(self._bias_name, self._bias, dummy=0.0)


class Mxfp4Experts(StackedExperts):
    """Experts with weights in mxfp4, dequantized in registers; rows are bfloat16."""

    def _allocate(self, part: ExpertPart) -> None:
        assert part.dtype == torch.bfloat16
        self._gate_up, self._down = (
            Mxfp4Matrix.empty(len(part.experts), *shape, device=part.device)
            for shape in (part.gate_up_shape, part.down_shape)
        )

    def gate_up(self, expert: int) -> Mxfp4Matrix:
        return self._gate_up[expert]

    def down(self, expert: int) -> Mxfp4Matrix:
        return self._down[expert]

    def finalize(self) -> None:
        # The kernels read the scales of a block of inputs, for adjacent outputs.
        gate_up_scales, down_scales = (
            matrix.scales.view(torch.uint8).transpose(1, 2).contiguous()
            for matrix in (self._gate_up, self._down)
        )
        self._store(
            _packed(self._gate_up),
            _packed(self._down),
            gate_up_scales=gate_up_scales,
            down_scales=down_scales,
        )
        # Free the tensors that the kernels do not read.
        self._gate_up = self._down = Mxfp4Matrix.empty(0, 0, device=self._gate_up.blocks.device)


class DequantizedExperts(ExpertProduct):
    """Experts with weights in mxfp4 or fp8 that are dequantized when they are loaded."""

    def __init__(self, part: ExpertPart) -> None:
        def stored(shape: tuple[int, int]) -> Mxfp4Matrix | Fp8Weight:
            if part.fp8 is None:
                return Mxfp4Matrix.empty(*shape, device=part.device)
            return Fp8Weight(part.fp8, *shape, device=part.device)

        self._plain = _plain_class(part.device)(part)
        self._gate_up, self._down = (
            [stored(shape) for _ in part.experts] for shape in (part.gate_up_shape, part.down_shape)
        )

    def gate_up(self, expert: int) -> Mxfp4Matrix | Fp8Weight:
        return self._gate_up[expert]

    def gate_up_bias(self, expert: int) -> torch.Tensor | None:
        return self._plain.gate_up_bias(expert)

    def down(self, expert: int) -> Mxfp4Matrix | Fp8Weight:
        return self._down[expert]

    def down_bias(self, expert: int) -> torch.Tensor | None:
        return self._plain.down_bias(expert)

    def __call__(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        return self._plain(x, choice)

    @property
    def num_bytes(self) -> int:
        return self._plain.num_bytes

    def finalize(self) -> None:
        for expert in reversed(range(len(self._gate_up))):
            for target, stored in (
                (self._plain.gate_up(expert), self._gate_up.pop()),
                (self._plain.down(expert), self._down.pop()),
            ):
                if isinstance(stored, Mxfp4Matrix):
                    target.copy_(dequantized_mxfp4(stored, target.dtype))
                else:
                    stored.finalize()
                    target.copy_(stored.dequantized(target.dtype))
        self._plain.finalize()


def make_expert_product(part: ExpertPart) -> ExpertProduct:
    """Return the product for the stored weights, the dtype of rows and the device."""
    if part.fp8 is not None:
        return DequantizedExperts(part)
    return product_class(part.config, dtype=part.dtype, device=part.device)(part)


def product_class(
    config: ExpertsConfig, *, dtype: torch.dtype, device: torch.device
) -> type[GroupedExperts | LinearExperts | Mxfp4Experts | DequantizedExperts]:
    """Return the class of the product for the stored weights, the dtype of rows and the device."""
    if not config.is_mxfp4:
        return _plain_class(device)
    # CPUs, and products in other dtypes, have no kernel for it.
    is_multiplied = device.type == "cuda" and dtype == torch.bfloat16
    return Mxfp4Experts if is_multiplied else DequantizedExperts


def _inner(kernel: LinearKernel, rows: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the input of the down projection of an expert with or without a gate."""
    if activation == "relu2":
        return activation_function(activation)(kernel(rows))
    return kernel.gated(rows, activation)


def _packed(matrix: Mxfp4Matrix) -> torch.Tensor:
    """Return the numbers of all experts as the kernels read them, in place if they fit."""
    # Triton is absent on machines without a GPU.
    from attention.kernels.triton.experts import mxfp4_row_bytes, packed_mxfp4

    blocks = matrix.blocks
    num_experts, out_size, num_blocks, _ = blocks.shape
    packed = blocks.flatten(2)
    if num_blocks % 2:
        row_bytes = mxfp4_row_bytes(num_blocks * MXFP4_BLOCK_SIZE)
        packed = blocks.new_empty(num_experts, out_size, row_bytes)
    for expert in range(num_experts):
        packed[expert].copy_(packed_mxfp4(blocks[expert]))
    return packed


def _plain_class(device: torch.device) -> type[GroupedExperts | LinearExperts]:
    return GroupedExperts if device.type == "cuda" else LinearExperts
