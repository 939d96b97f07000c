"""A layer of experts against its plain definition in float64."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from pagedray.model_config import ClampedGate, ExpertsConfig, TensorNames
from tests.workers.lone_rank import LoneRank
from workers.layers import expert_product
from workers.layers.expert_product import (
    Choice,
    DequantizedExperts,
    ExpertPart,
    GroupedExperts,
    LinearExperts,
    Mxfp4Experts,
)
from workers.layers.experts import ExpertLayer
from workers.layers.formats.mxfp4 import SCALE, Mxfp4Matrix
from workers.layers.linear_choice import PackedGemmLinear, linear_kernel_class
from workers.layers.linear_kernel import DenseLinear
from workers.layers.mlp import GatedMLP, MLPParams, PlainMLP
from workers.layers.weight import Placement
from workers.parallel.group import ParallelGroup, SoloGroup

CPU = torch.device("cpu")
# Without a GPU, Triton's interpreter runs the kernels.
TRITON_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN = 24
EXPERTS = ExpertsConfig(num_experts=6, num_chosen=2, intermediate_size=32, is_renormalized=True)
STACKED = TensorNames(
    router="router", expert_input=("input.weight",), expert_output="output.weight"
)
GPT_OSS = TensorNames(
    router="router",
    expert_input=("input",),
    expert_input_bias="input_bias",
    expert_output="output",
    expert_output_bias="output_bias",
    is_expert_input_interleaved=True,
    are_experts_transposed=True,
)
GELU = replace(EXPERTS, activation="gelu_tanh")
RELU2 = replace(EXPERTS, activation="relu2", has_bias=True)
CLAMPED = replace(EXPERTS, has_bias=True, gate=ClampedGate(alpha=1.3, limit=0.8))


def empty_layer(
    names: TensorNames, config: ExpertsConfig = EXPERTS, group: ParallelGroup | None = None
) -> ExpertLayer:
    return ExpertLayer(
        "p",
        names,
        config,
        Placement(group or SoloGroup(), torch.float32, CPU),
        hidden_size=HIDDEN,
        shared=None,
    )


def filled_layer(
    names: TensorNames, config: ExpertsConfig = EXPERTS, group: ParallelGroup | None = None
) -> tuple[ExpertLayer, dict[str, torch.Tensor]]:
    """Return a layer and its whole tensors in float64, by the names of the checkpoint."""
    layer = empty_layer(names, config, group)
    return layer, {name: tensor.double() for name, tensor in filled(layer).items()}


def filled(
    layer: ExpertLayer, tensors: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Fill a layer with the tensors of a checkpoint, or with random tensors, and return them."""
    tensors = {} if tensors is None else tensors
    for shard in layer.weight_shards():
        if shard.name not in tensors:
            generator = torch.Generator().manual_seed(len(tensors))
            tensors[shard.name] = torch.randn(shard.shape, generator=generator) / HIDDEN**0.5
        if shard.target.numel():
            shard.target.copy_(tensors[shard.name][shard.part])
    layer.finalize()
    return tensors


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
        torch.testing.assert_close(layer(x[part]), whole[part], rtol=1e-6, atol=1e-6)
        # Other kernels round differently for many rows.
        if linear_kernel_class(torch.float32, CPU) is PackedGemmLinear:
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


@torch.inference_mode()
def test_clamped_gates_and_biases_are_those_of_gpt_oss() -> None:
    layer, tensors = filled_layer(GPT_OSS, CLAMPED)
    assert tensors["p.input"].shape == (6, HIDDEN, 64)
    x = rows_of(9)
    rows = []
    for row in x.double():
        logits = tensors["p.router.weight"] @ row + tensors["p.router.bias"]
        top = logits.topk(2)
        row_sum = torch.zeros_like(row)
        for weight, expert in zip(top.values.softmax(0), top.indices.tolist(), strict=True):
            inner = row @ tensors["p.input"][expert] + tensors["p.input_bias"][expert]
            gate, up = inner[::2].clamp(max=0.8), inner[1::2].clamp(-0.8, 0.8)
            outer = gate * torch.sigmoid(1.3 * gate) * (up + 1.0)
            outputs = outer @ tensors["p.output"][expert] + tensors["p.output_bias"][expert]
            row_sum += weight * outputs
        rows.append(row_sum)
    torch.testing.assert_close(layer(x), torch.stack(rows).float())


@torch.inference_mode()
def test_experts_without_gates_have_one_tensor_of_inputs() -> None:
    names = replace(TensorNames(), expert_input=("mlp.experts.{}.up_proj.weight",))
    layer, tensors = filled_layer(names, replace(EXPERTS, activation="relu2"))
    x = rows_of(9)
    scores, chosen = (x.double() @ tensors["p.mlp.gate.weight"].T).softmax(1).topk(2, dim=1)
    weights = scores / scores.sum(1, keepdim=True)
    rows = torch.zeros(9, HIDDEN, dtype=torch.float64)
    for row, place in itertools.product(range(9), range(2)):
        expert = f"p.mlp.experts.{int(chosen[row, place])}"
        inner = (tensors[f"{expert}.up_proj.weight"] @ x[row].double()).relu().square()
        rows[row] += weights[row, place] * (tensors[f"{expert}.down_proj.weight"] @ inner)
    torch.testing.assert_close(layer(x), rows.float())
    work = layer.weight_work()
    assert work.expert_bytes == 4 * 6 * 2 * 32 * HIDDEN
    assert work.row_flop == 2 * (6 + 2 * 2 * 32) * HIDDEN


@pytest.mark.parametrize(
    ("names", "experts"),
    [(TensorNames(), EXPERTS), (STACKED, EXPERTS), (GPT_OSS, CLAMPED)],
    ids=["single", "stacked", "gpt-oss"],
)
@pytest.mark.parametrize("is_expert_parallel", [False, True])
@torch.inference_mode()
def test_the_parts_of_three_ranks_add_up(
    is_expert_parallel: bool, names: TensorNames, experts: ExpertsConfig
) -> None:
    config = replace(experts, intermediate_size=30, is_expert_parallel=is_expert_parallel)
    x = rows_of(20)
    parts = [filled_layer(names, config, LoneRank(rank, 3))[0](x) for rank in range(3)]
    whole, _ = filled_layer(names, config)
    torch.testing.assert_close(torch.stack(parts).sum(0), whole(x))


SHARED = replace(
    TensorNames(),
    shared_input=("shared.gate", "shared.up"),
    shared_output="shared.down",
    shared_gate="shared_gate",
)
SHARED_FUSED = replace(SHARED, shared_input=("shared.input",))
UP_ONLY = replace(
    SHARED_FUSED, expert_input=("mlp.experts.{}.up_proj.weight",), router_bias="mlp.bias"
)
SIGMOID = replace(
    EXPERTS,
    activation="relu2",
    has_sigmoid_scores=True,
    has_choice_bias=True,
    weight_scale=2.5,
)


def layer_with_shared(names: TensorNames, config: ExpertsConfig) -> ExpertLayer:
    """Return a layer with a shared MLP of its own."""
    place = Placement(SoloGroup(), torch.float32, CPU)
    params = MLPParams(
        hidden_size=HIDDEN,
        intermediate_size=2 * config.intermediate_size,
        activation=config.activation,
        has_bias=False,
    )
    kind = PlainMLP if config.activation == "relu2" else GatedMLP
    inputs = tuple(f"p.{name}" for name in names.shared_input)
    shared = kind(inputs, f"p.{names.shared_output}", params, place)
    return ExpertLayer("p", names, config, place, hidden_size=HIDDEN, shared=shared)


@pytest.mark.parametrize(
    ("names", "config"),
    [
        (SHARED, replace(EXPERTS, has_shared_gate=True)),
        (SHARED_FUSED, EXPERTS),
        (UP_ONLY, SIGMOID),
    ],
    ids=["gate", "fused", "sigmoid"],
)
@pytest.mark.parametrize("kind", ["linear", "few rows", "many rows"])
@torch.inference_mode()
def test_a_shared_mlp_may_be_stored_as_experts(
    kind: str, names: TensorNames, config: ExpertsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = layer_with_shared(names, config)
    tensors = filled(whole)
    device = CPU
    if kind != "linear":
        pytest.importorskip("triton")
        device = TRITON_DEVICE
        monkeypatch.setattr(expert_product, "_plain_class", lambda _: GroupedExperts)
        monkeypatch.setattr(expert_product, "linear_kernel_class", lambda *_: DenseLinear)
    if kind == "many rows":
        monkeypatch.setattr(expert_product, "_MAX_STACKED_ROWS", 4)
    x = rows_of(9)
    sums = torch.zeros(9, HIDDEN)
    for rank in range(2):
        layer = ExpertLayer(
            "p",
            names,
            replace(config, num_stacked=2),
            Placement(LoneRank(rank, 2), torch.float32, device),
            hidden_size=HIDDEN,
            shared=None,
        )
        filled(layer, tensors)
        stream = torch.ones(9, HIDDEN, device=device)
        rows = x.to(device)
        output = layer.forward_residual(stream, rows, layer.choose(rows))
        sums += (stream - 1.0 if output is None else output).cpu()
        assert 2 * layer.weight_work().expert_bytes == whole.weight_work().expert_bytes
    torch.testing.assert_close(sums, whole(x), rtol=1e-5, atol=1e-5)


def test_a_rank_reads_only_its_experts() -> None:
    config = replace(EXPERTS, is_expert_parallel=True)
    shards = list(empty_layer(TensorNames(), config, LoneRank(1, 3)).weight_shards())
    filled = {shard.name for shard in shards if shard.target.numel()}
    assert {name.split(".")[3] for name in filled if "experts" in name} == {"2", "3"}
    # All tensors are checked on each rank.
    whole = empty_layer(TensorNames()).weight_shards()
    assert {shard.name for shard in shards} == {shard.name for shard in whole}


@pytest.mark.parametrize(
    "config", [EXPERTS, CLAMPED, GELU, RELU2], ids=["silu", "clamped", "gelu", "relu2"]
)
@pytest.mark.parametrize("num_rows", [3, 60])
@torch.inference_mode()
def test_grouped_experts_compute_what_single_ones_do(num_rows: int, config: ExpertsConfig) -> None:
    pytest.importorskip("triton")
    products = [
        kind(
            ExpertPart(
                config=config,
                experts=range(2, 6),
                hidden_size=HIDDEN,
                intermediate_size=20,
                has_output_bias=config.has_bias,
                dtype=torch.float32,
                device=device,
            )
        )
        for kind, device in ((LinearExperts, CPU), (GroupedExperts, TRITON_DEVICE))
    ]
    for expert in range(4):
        for product in products:
            generator = torch.Generator().manual_seed(expert)
            for target in (
                product.gate_up(expert),
                product.down(expert),
                product.gate_up_bias(expert),
                product.down_bias(expert),
            ):
                if target is not None:
                    target.copy_(torch.randn(target.shape, generator=generator) / HIDDEN**0.5)
    for product in products:
        product.finalize()
    x = rows_of(num_rows)
    weights, experts = torch.rand(num_rows, 6).topk(3, dim=1)
    single, grouped = (
        product(x.to(device), Choice(experts.to(device), weights.to(device))).cpu()
        for product, device in zip(products, (CPU, TRITON_DEVICE), strict=True)
    )
    torch.testing.assert_close(grouped, single, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_rows", [1, pytest.param(3, marks=pytest.mark.slow), 40])
@torch.inference_mode()
def test_products_in_mxfp4_are_those_of_dequantized_weights(num_rows: int) -> None:
    pytest.importorskip("triton")
    products = [
        kind(
            ExpertPart(
                config=CLAMPED,
                experts=range(2, 6),
                hidden_size=96,
                intermediate_size=64,
                has_output_bias=True,
                dtype=torch.bfloat16,
                device=device,
            )
        )
        for kind, device in ((DequantizedExperts, CPU), (Mxfp4Experts, TRITON_DEVICE))
    ]
    for expert in range(4):
        for product in products:
            generator = torch.Generator().manual_seed(expert)
            for matrix in (product.gate_up(expert), product.down(expert)):
                assert isinstance(matrix, Mxfp4Matrix)
                blocks = torch.randint(0, 256, matrix.blocks.shape, generator=generator)
                scales = torch.randint(121, 125, matrix.scales.shape, generator=generator)
                matrix.blocks.copy_(blocks)
                matrix.scales.copy_(scales.to(torch.uint8).view(SCALE))
            for bias in (product.gate_up_bias(expert), product.down_bias(expert)):
                assert bias is not None
                bias.copy_(torch.randn(bias.shape, generator=generator))
    for product in products:
        product.finalize()
    x = torch.randn(num_rows, 96, generator=torch.Generator().manual_seed(7)).bfloat16()
    weights, experts = torch.rand(num_rows, 6).topk(3, dim=1)
    plain, ours = (
        product(x.to(device), Choice(experts.to(device), weights.to(device))).cpu()
        for product, device in zip(products, (CPU, TRITON_DEVICE), strict=True)
    )
    # The interpreter does not round to the nearest bfloat16.
    assert (ours - plain).float().norm() < 1.5e-2 * plain.float().norm()
