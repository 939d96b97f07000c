"""A layer of experts against its plain definition in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from pagedray.config import ExpertsConfig, TensorNames
from workers.layers.experts import ExpertLayer
from workers.parallel.group import ParallelGroup, SoloGroup

CPU = torch.device("cpu")
HIDDEN = 24
EXPERTS = ExpertsConfig(num_experts=6, num_chosen=2, intermediate_size=32, is_renormalized=True)
STACKED = TensorNames(router="router", expert_input=("input",), expert_output="output")


def filled_layer(
    names: TensorNames, config: ExpertsConfig = EXPERTS, group: ParallelGroup | None = None
) -> tuple[ExpertLayer, dict[str, torch.Tensor]]:
    """Return a layer and its whole tensors in float64, by the names of the checkpoint."""
    layer = ExpertLayer(
        "p",
        names,
        config,
        hidden_size=HIDDEN,
        shared=None,
        reduces=True,
        group=group or SoloGroup(),
        dtype=torch.float32,
        device=CPU,
    )
    tensors: dict[str, torch.Tensor] = {}
    for shard in layer.weight_shards():
        if shard.name not in tensors:
            generator = torch.Generator().manual_seed(len(tensors))
            tensors[shard.name] = torch.randn(shard.shape, generator=generator) / HIDDEN**0.5
        if shard.target.numel():
            shard.target.copy_(tensors[shard.name][shard.part])
    layer.finalize()
    return layer, {name: tensor.double() for name, tensor in tensors.items()}


def expected(
    x: torch.Tensor, tensors: dict[str, torch.Tensor], config: ExpertsConfig
) -> torch.Tensor:
    """Return what each row becomes, one row and one expert at a time."""
    rows = []
    for row in x.double():
        probabilities = (tensors["p.mlp.gate.weight"] @ row).softmax(0)
        chosen = probabilities.argsort(descending=True)[: config.num_chosen].tolist()
        total = sum(float(probabilities[expert]) for expert in chosen)
        row_sum = torch.zeros_like(row)
        for expert in chosen:
            gate, up, down = (
                tensors[f"p.mlp.experts.{expert}.{name}_proj.weight"]
                for name in ("gate", "up", "down")
            )
            weight = float(probabilities[expert]) / (total if config.is_renormalized else 1.0)
            row_sum += weight * (down @ (functional.silu(gate @ row) * (up @ row)))
        rows.append(row_sum)
    return torch.stack(rows)


def rows_of(number: int) -> torch.Tensor:
    return torch.randn(number, HIDDEN, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("is_renormalized", [True, False])
@pytest.mark.parametrize("num_chosen", [1, 4, 6])
@pytest.mark.parametrize("num_rows", [1, 37])
@torch.inference_mode()
def test_each_row_is_the_weighted_sum_of_its_experts(
    num_rows: int, num_chosen: int, is_renormalized: bool
) -> None:
    config = ExpertsConfig(
        num_experts=6,
        num_chosen=num_chosen,
        intermediate_size=20,
        is_renormalized=is_renormalized,
    )
    layer, tensors = filled_layer(TensorNames(), config)
    x = rows_of(num_rows)
    torch.testing.assert_close(layer(x), expected(x, tensors, config).float())


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    layer, _ = filled_layer(TensorNames())
    x = rows_of(50)
    whole = layer(x)
    for part in (slice(0, 1), slice(7, 8), slice(3, 31), slice(48, 50)):
        assert torch.equal(layer(x[part]), whole[part])


@torch.inference_mode()
def test_stacked_tensors_are_those_of_single_experts() -> None:
    stacked, tensors = filled_layer(STACKED)
    single = {"p.mlp.gate.weight": tensors["p.router.weight"]}
    inputs, outputs = tensors["p.input.weight"], tensors["p.output.weight"]
    assert inputs.shape == (6, 64, HIDDEN)
    for expert in range(6):
        gate, up = inputs[expert].chunk(2)
        single[f"p.mlp.experts.{expert}.gate_proj.weight"] = gate
        single[f"p.mlp.experts.{expert}.up_proj.weight"] = up
        single[f"p.mlp.experts.{expert}.down_proj.weight"] = outputs[expert]
    x = rows_of(9)
    torch.testing.assert_close(stacked(x), expected(x, single, EXPERTS).float())
