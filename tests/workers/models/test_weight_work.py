"""What the weights of a model cost a step, against the tensors of its checkpoint."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attention.cpu.torch_sdpa import TorchSDPABackend
from pagedray.config import EngineConfig
from tests.small_models.quantized_checkpoints import save_compressed, save_wide
from tests.workers.models.two_ranks import on_two_ranks
from tests.workers.reference import CPU, loaded_model, save_checkpoint
from tests.workers.reference_cases import CASES
from workers.models.decoder import Decoder
from workers.models.families.registry import read_model_config
from workers.parallel.group import ParallelGroup, SoloGroup
from workers.weights.load_weights import load_weights, with_stored_experts

TABLES = ("embed_tokens", "word_embeddings.", "wte", "lm_head")
HEAD_NORMS = {"q_norm": "heads", "k_norm": "kv_heads"}
EXPERT = re.compile(r"\.experts\.|block_sparse_moe\.(input|output)_linear")
LAST = re.compile(r"\.(layers|h|blocks)\.2\.|^model\.norm\.|\.ln_f\.|\.norm_f\.")
BEFORE_ATTENTION = re.compile(
    r"\.(input_layernorm|norm_1)\.|\.([qkv]_proj|qkv_proj|query_key_value|Wqkv|q_norm|k_norm)\.|sinks"
)
"""Tensors that each token needs for its keys and values, and for its attention."""


def num_numbers(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def matrices(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor.dim() == 2}


def layer_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return those that are neither an embedding nor a head."""
    return {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not any(table in name for table in TABLES)
    }


def sampled_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return those that only tokens with logits need: what follows the last of three attentions."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if LAST.search(name) and not BEFORE_ATTENTION.search(name)
    }


def num_in_head(folder: Path) -> int:
    tensors = load_file(folder / "model.safetensors")
    return tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).numel()


def without(
    tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in others}


def num_repeated(name: str, tensors: dict[str, torch.Tensor], head_size: int) -> int:
    """Return how many more numbers the norms of heads have when each head has its own."""
    number = 0
    for key, tensor in tensors.items():
        for norm, heads in HEAD_NORMS.items():
            if norm in key and tensor.numel() == head_size:
                number += (CASES[name][heads] - 1) * head_size
    return number


@pytest.mark.parametrize(
    "name",
    [
        "llama-6-heads-3-kv",
        "llama-6-heads-2-kv-biases",
        "qwen3-wide-heads",
        "gemma2-capped",
        "bloom-6-heads",
        "mpt-clipped",
        "phi3-window",
        "olmo2-6-heads-2-kv",
        "cohere2-parallel",
        "glm4-four-norms",
    ],
)
def test_a_step_reads_all_tensors_but_the_embedding(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    model = loaded_model(tmp_path, SoloGroup())
    tensors = layer_tensors(tmp_path)
    body, sampled = model.body_work(), model.sampled_work()
    last = sampled_tensors(tensors)
    of_all = without(tensors, last)
    repeated = num_repeated(name, tensors, model.config.head_size)
    assert body.num_bytes == 4 * (num_numbers(of_all) + repeated)
    assert body.row_flop == 2 * num_numbers(matrices(of_all))
    num_head = 131 * model.config.hidden_size
    assert sampled.num_bytes == 4 * (num_numbers(last) + num_head)
    assert sampled.row_flop == 2 * (num_numbers(matrices(last)) + num_head)
    assert body.expert_bytes == body.fp8_row_flop == sampled.fp8_row_flop == 0


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe-dense-layers-windows",
        "mixtral-window",
        "granitemoeshared-tied",
        "granitemoe_swa-sinks",
        "gpt_oss-limits",
    ],
)
def test_experts_are_apart_from_what_every_step_reads(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    config = with_stored_experts(EngineConfig(model=read_model_config(tmp_path, dtype="float32")))
    model = Decoder(config.model, SoloGroup(), backend=TorchSDPABackend, device=CPU)
    load_weights(model, config)
    tensors = layer_tensors(tmp_path)
    experts = {key: one for key, one in tensors.items() if EXPERT.search(key)}
    last, choice = sampled_tensors(tensors), model.config.experts
    assert choice is not None
    repeated = num_repeated(name, tensors, model.config.head_size)
    num_head = 131 * model.config.hidden_size
    for work, part, num_more, num_products in (
        (model.body_work(), without(tensors, last), repeated, 0),
        (model.sampled_work(), last, num_head, num_head),
    ):
        of_experts = {key: one for key, one in part.items() if key in experts}
        others = without(part, experts)
        assert work.expert_bytes == 4 * num_numbers(of_experts)
        assert work.num_bytes == 4 * (num_numbers(others) + num_more)
        weights = {key: one for key, one in of_experts.items() if not key.endswith("bias")}
        chosen = num_numbers(weights) * choice.num_chosen / choice.num_experts
        expected = 2 * (num_numbers(matrices(others)) + chosen + num_products)
        assert work.row_flop == pytest.approx(expected)


@pytest.mark.parametrize("is_expert_parallel", [False, True])
def test_two_ranks_divide_the_work(is_expert_parallel: bool, tmp_path: Path) -> None:
    save_checkpoint("granitemoe-multipliers", tmp_path)

    def work(group: ParallelGroup) -> tuple[float, float]:
        model = loaded_model(tmp_path, group, is_expert_parallel=is_expert_parallel)
        work = model.body_work() + model.sampled_work()
        return work.expert_bytes, work.row_flop

    whole = work(SoloGroup())
    first, second = on_two_ranks(work)
    assert first == second
    assert 2 * first[0] == whole[0]
    # Each rank has the routers of six experts in three layers. The vocabulary of 131 is padded.
    assert 2 * first[1] == pytest.approx(whole[1] + 2 * 3 * 6 * 48 + 2 * 48)


def test_numbers_of_four_bits_are_read_as_they_are_stored(tmp_path: Path) -> None:
    folder, compressed = tmp_path / "plain", tmp_path / "compressed"
    save_wide(folder)
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    save_compressed(folder, compressed, scheme, None)
    tensors = layer_tensors(compressed)
    packed = {name: one for name, one in tensors.items() if name.endswith("weight_packed")}
    others = {name: one for name, one in tensors.items() if name.endswith(("scale", "norm.weight"))}
    assert len(packed) == 21
    model = loaded_model(compressed, SoloGroup(), "bfloat16")
    for work, part, num_head in (
        (model.body_work(), without(tensors, sampled_tensors(tensors)), 0),
        (model.sampled_work(), sampled_tensors(tensors), num_in_head(folder)),
    ):
        num_packed = num_numbers({key: one for key, one in part.items() if key in packed})
        num_others = num_numbers({key: one for key, one in part.items() if key in others})
        assert work.num_bytes == 4 * num_packed + 2 * (num_others + num_head)
        assert work.row_flop == 2 * (8 * num_packed + num_head)


def test_weights_that_are_dequantized_are_read_in_the_dtype_of_the_model(tmp_path: Path) -> None:
    folder, compressed = tmp_path / "plain", tmp_path / "compressed"
    save_wide(folder)
    scheme = {"num_bits": 8, "type": "float", "strategy": "channel"}
    save_compressed(folder, compressed, scheme, scheme | {"strategy": "token", "dynamic": True})
    model = loaded_model(compressed, SoloGroup(), "float32")
    work = model.body_work() + model.sampled_work()
    assert work.num_bytes == 4 * (num_numbers(layer_tensors(folder)) + num_in_head(folder))
    assert work.fp8_row_flop == 0.0
