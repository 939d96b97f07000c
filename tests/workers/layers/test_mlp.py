"""Both kinds of MLP against their plain definitions."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from pagedray.model_config import Activation
from workers.layers.activation import activation_function
from workers.layers.mlp import MLP, GatedMLP, MLPParams, PlainMLP
from workers.layers.weight import Placement
from workers.parallel.group import SoloGroup

ACTIVATIONS: list[Activation] = ["silu", "gelu", "gelu_tanh"]


def _filled(
    kind: type[MLP], names: tuple[str, ...], activation: Activation
) -> tuple[MLP, dict[str, list[torch.Tensor]]]:
    torch.manual_seed(0)
    mlp = kind(
        names,
        "down",
        MLPParams(hidden_size=12, intermediate_size=20, activation=activation, has_bias=False),
        Placement(SoloGroup(), torch.float32, torch.device("cpu")),
    )
    weights: dict[str, list[torch.Tensor]] = {}
    for shard in mlp.weight_shards():
        weights.setdefault(shard.name, []).append(shard.target.normal_().clone())
    mlp.finalize()
    return mlp, weights


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("names", [("gate", "up"), ("both",)])
@torch.inference_mode()
def test_a_gated_mlp_activates_the_gate(names: tuple[str, ...], activation: Activation) -> None:
    mlp, weights = _filled(GatedMLP, names, activation)
    gate, up = (tensor for name in names for tensor in weights[f"{name}.weight"])
    x = torch.randn(3, 12)
    bent = activation_function(activation)(functional.linear(x, gate)) * functional.linear(x, up)
    torch.testing.assert_close(mlp(x), functional.linear(bent, weights["down.weight"][0]))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@torch.inference_mode()
def test_a_plain_mlp_has_no_gate(activation: Activation) -> None:
    mlp, weights = _filled(PlainMLP, ("up",), activation)
    x = torch.randn(3, 12)
    bent = activation_function(activation)(functional.linear(x, weights["up.weight"][0]))
    torch.testing.assert_close(mlp(x), functional.linear(bent, weights["down.weight"][0]))


def test_activations_match_their_names() -> None:
    x = torch.linspace(-3.0, 3.0, 50)
    exact = 0.5 * x * (1.0 + torch.erf(x / 2**0.5))
    inner = (2.0 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    torch.testing.assert_close(activation_function("gelu")(x), exact)
    torch.testing.assert_close(activation_function("gelu_tanh")(x), 0.5 * x * (1.0 + inner.tanh()))
