"""Small random models of every family against Transformers, on one rank."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attention.cpu.torch_sdpa import TorchSDPABackend
from pagedray.config import EngineConfig
from tests.workers.models.two_ranks import on_two_ranks
from tests.workers.reference import (
    CPU,
    NUM_TOKENS,
    loaded_model,
    reference_logits,
    run,
    save_checkpoint,
)
from tests.workers.reference_cases import CASES
from workers.models.decoder import Decoder
from workers.models.families.bert import BERT, ROBERTA
from workers.models.families.registry import FAMILIES, read_model_config
from workers.models.fused_layers import LayerTail
from workers.models.fused_norm import Delta
from workers.parallel.group import ParallelGroup, SoloGroup
from workers.weights.load_weights import load_weights, with_stored_experts


class RowCount:
    """Notes of how many tokens a layer computes what follows its attention."""

    def __init__(self, finish: Callable[[LayerTail], Delta], counts: list[int]) -> None:
        self._finish = finish
        self._counts = counts

    def __call__(self, tokens: LayerTail) -> Delta:
        self._counts.append(len(tokens.residual))
        return self._finish(tokens)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    group = SoloGroup()
    logits = run(loaded_model(tmp_path, group), group)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, reference_logits(tmp_path), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe-dense-layers-windows",
        "mixtral-window",
        "olmoe-6-heads-2-kv",
        "granitemoe-multipliers",
        "granitemoeshared-tied",
        "granitemoe_swa-sinks",
        "gpt_oss-limits",
        "lfm2_moe-biases",
        "qwen3_5_moe_text-biases",
    ],
)
def test_experts_may_be_stored_as_transformers_holds_them(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path, save_original_format=False)
    group = SoloGroup()
    config = with_stored_experts(EngineConfig(model=read_model_config(tmp_path, dtype="float32")))
    model = Decoder(config.model, group, backend=TorchSDPABackend, device=CPU)
    load_weights(model, config)
    expected = reference_logits(tmp_path)
    torch.testing.assert_close(run(model, group), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "llama-6-heads-2-kv-biases",
        "mistral-short-window",
        "qwen3-wide-heads",
        "gemma2-capped",
        "gemma3-two-ropes",
        "gemma4-plain",
        "gemma4-shared-embeddings",
        "gemma4-experts-keys-as-values",
        "bloom-6-heads",
        "mpt-clipped",
        "phi3-longrope-partial",
        "granite-multipliers",
        "olmo2-6-heads-2-kv",
        "olmo3-two-ropes",
        "ministral3-growing-queries",
        "cohere2-parallel",
        "glm4-four-norms",
        "starcoder2-window",
        "ernie-biases",
        "qwen3_moe-renormalized",
        "granitemoeshared-tied",
    ],
)
def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    group = SoloGroup()
    exact = reference_logits(tmp_path)
    ours = run(loaded_model(tmp_path, group, "bfloat16"), group)
    theirs = reference_logits(tmp_path, torch.bfloat16)
    assert (ours - exact).norm() < 1.3 * (theirs - exact).norm()


@pytest.mark.parametrize(
    "name",
    [
        "mistral-short-window",
        "qwen2-layer-types",
        "gemma2-capped",
        "gemma3-two-ropes",
        "gemma4-plain",
        "gemma4-shared-embeddings",
        "gemma4-experts-keys-as-values",
        "gemma4-wide-full-layers",
        "mpt-12-heads",
        "qwen3_moe-dense-layers-windows",
        "granitemoe_swa-sinks",
        "gpt_oss-yarn",
        "lfm2-biases-no-adjustment",
        "lfm2-no-attention",
        "lfm2_moe-plain-scores",
        "qwen3_next-fused-projections",
        "qwen3_5_text-most-recurrent",
    ],
)
def test_steps_of_a_sequence_give_what_one_step_gives(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    group = SoloGroup()
    model = loaded_model(tmp_path, group)
    whole = run(model, group)
    torch.testing.assert_close(
        run(model, group, (9, NUM_TOKENS - 10, 1)), whole[-1:], rtol=1e-4, atol=1e-4
    )


def test_every_family_of_decoders_has_a_case() -> None:
    model_types = {case["model_type"] for case in CASES.values()}
    without = [one.architecture for one in FAMILIES if not model_types & set(one.model_types)]
    assert without == [BERT.architecture, ROBERTA.architecture]


@pytest.mark.parametrize(
    "name",
    [
        "llama-6-heads-2-kv-biases",
        "bloom-6-heads",
        "gemma2-capped",
        "cohere2-parallel",
        "granite-multipliers",
        "mixtral-window",
        "gpt_oss-limits",
    ],
)
def test_only_sampled_tokens_pass_the_end_of_the_last_layer(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    expected = reference_logits(tmp_path)
    rows = torch.tensor([NUM_TOKENS - 1, 3])

    def sampled(group: ParallelGroup) -> tuple[torch.Tensor, list[int]]:
        model = loaded_model(tmp_path, group)
        finished: list[int] = []
        for layer in model.fused.layers:
            layer.finish = RowCount(layer.finish, finished)  # type: ignore[method-assign, assignment]
        return run(model, group, logits_indices=rows), finished

    for logits, finished in (sampled(SoloGroup()), *on_two_ranks(sampled)):
        torch.testing.assert_close(logits, expected[rows], rtol=1e-4, atol=1e-4)
        assert finished == [NUM_TOKENS, NUM_TOKENS, 2]


def test_a_step_without_sampled_tokens_has_no_logits(tmp_path: Path) -> None:
    save_checkpoint("llama-6-heads-3-kv", tmp_path)
    group = SoloGroup()
    model = loaded_model(tmp_path, group)
    none = torch.empty(0, dtype=torch.int64)
    assert run(model, group, logits_indices=none).shape == (0, 131)


@pytest.mark.parametrize("original", [16, NUM_TOKENS])
def test_longrope_has_the_factors_of_the_longest_sequence(original: int, tmp_path: Path) -> None:
    save_checkpoint("phi3-longrope-partial", tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text()) | {"original_max_position_embeddings": original}
    path.write_text(json.dumps(values))
    short = read_model_config(tmp_path)
    assert short.max_positions == original
    assert short.with_context(original) is short
    config = short.with_context(NUM_TOKENS if original < NUM_TOKENS else original)
    model = Decoder(config, SoloGroup(), backend=TorchSDPABackend, device=CPU)
    load_weights(model, EngineConfig(model=config))
    torch.testing.assert_close(
        run(model, SoloGroup()), reference_logits(tmp_path), rtol=1e-4, atol=1e-4
    )
