"""A step of one row, whose products norm what they read and add to the stream what they write."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from attention.kernels.arguments import DeferredRMSNorm, RowConv, SplitKPartials
from attention.kernels.triton import delta_rule
from cluster.llm.generation import Completion
from pagedray import LLM, SamplingParams
from pagedray.model_config import Activation
from tests.small_models.checkpoints import save_word_tokenizer
from tests.workers.reference import NUM_TOKENS, loaded_model, reference_logits, run, save_checkpoint
from workers.layers import linear_choice
from workers.layers.hopper_linear import HopperLinear
from workers.models import decoder_layer
from workers.parallel.group import SoloGroup

pytest.importorskip("triton")

VOCAB_SIZE = 8192
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
# All experts are chosen: scores of random routers nearly tie, so that with fewer experts, rounding
# would choose others.
QWEN = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 1024,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "full_attention_interval": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "num_experts": 8,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 1024,
    "intermediate_size": 384,
    "hybrid_override_pattern": "MEM*EMEME",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 16,
    "n_groups": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 384,
    "moe_shared_expert_intermediate_size": 768,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


class CountingLinear(HopperLinear):
    """Counts the products that do the work of another kernel as well."""

    counts: ClassVar[Counter[str]] = Counter()

    def forward_with_norm(
        self, row: DeferredRMSNorm, normed: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.counts["norm"] += 1
        return super().forward_with_norm(row, normed)

    def convolved_with_norm(self, row: DeferredRMSNorm, conv: RowConv) -> torch.Tensor:
        self.counts["norm and convolution"] += 1
        return super().convolved_with_norm(row, conv)

    def gated_with_norm(self, row: DeferredRMSNorm, activation: Activation) -> torch.Tensor:
        self.counts["norm and gate"] += 1
        return super().gated_with_norm(row, activation)

    def forward_residual(
        self, stream: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor | SplitKPartials | None:
        product = super().forward_residual(stream, x)
        self.counts["sum"] += product is None and len(x) == 1
        return product


class PlainLinear(HopperLinear):
    """Leaves norms and sums to kernels of their own."""

    def accepts_deferred_norm(self, num_rows: int) -> bool:
        return False

    def forward_residual(self, stream: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self(x)


def use(kind: type[HopperLinear], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_choice, "linear_kernel_class", lambda dtype, device: kind)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets only without a GPU")
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("llama-6-heads-3-kv", {"norm": 3, "norm and gate": 3, "sum": 6}),
        # One layer of three has an MLP, behind which alone the stream is whole on a CPU. Routers
        # norm the rows of experts.
        ("qwen3_moe-dense-layers-windows", {"norm": 4, "norm and gate": 1, "sum": 4}),
        (
            "qwen3_5_text-most-recurrent",
            {"norm": 1, "norm and convolution": 4, "norm and gate": 5, "sum": 10},
        ),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                # With a bias, the gate is a kernel of its own.
                ("llama-6-heads-2-kv-biases", {"norm": 6, "norm and gate": 3, "sum": 6}),
                ("gemma-one-kv-head", {"norm": 3, "norm and gate": 3, "sum": 6}),
                ("granite-multipliers", {"norm": 1}),
                ("gemma2-capped", {"norm": 1}),
                ("mpt-12-heads", {"sum": 6}),
                ("cohere2-parallel", {}),
                ("olmo2-6-heads-2-kv", {}),
                ("nemotron_h-last-without-mlp", {"norm": 2, "norm and convolution": 1, "sum": 3}),
            )
        ),
    ],
)
def test_a_step_of_one_row_gives_what_transformers_does(
    name: str, counts: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(name, tmp_path)
    group = SoloGroup()
    use(CountingLinear, monkeypatch)
    CountingLinear.counts.clear()
    logits = run(loaded_model(tmp_path, group), group, (NUM_TOKENS - 1, 1))
    expected = reference_logits(tmp_path)[-1:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert +CountingLinear.counts == counts


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
@pytest.mark.parametrize("config", [LLAMA, QWEN, NEMOTRON], ids=["llama", "qwen", "nemotron"])
def test_graphs_of_one_row_give_what_single_kernels_do(
    config: dict[str, Any],  # Any: JSON values
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_word_tokenizer(tmp_path, VOCAB_SIZE)
    prompts = [list(range(first, first + 100)) for first in range(2, 802, 100)]
    sampling = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=5)
    outputs: list[list[Completion]] = []
    for kind in (HopperLinear, PlainLinear):
        use(kind, monkeypatch)
        if kind is PlainLinear:
            monkeypatch.setattr(decoder_layer, "num_stacked", lambda *_: 0)
            monkeypatch.setattr(delta_rule, "_FEW_ROWS", 0)
        with LLM(
            tmp_path,
            executor="local",
            device="cuda",
            load_format="dummy",
            max_num_seqs=4,
            show_progress=False,
        ) as llm:
            one_by_one = [llm.generate([one], sampling, use_tqdm=False)[0] for one in prompts]
        outputs.append([one.outputs[0] for one in one_by_one])
    num_equal = sum(map(checked_prefix, *outputs))
    assert num_equal >= 32


def checked_prefix(fused: Completion, plain: Completion) -> int:
    """Return how many tokens are equal, whose likeliest ones must be as likely in both."""
    assert fused.logprobs is not None
    assert plain.logprobs is not None
    steps = zip(fused.token_ids, plain.token_ids, fused.logprobs, plain.logprobs, strict=True)
    for num_equal, (token, other, likely, other_likely) in enumerate(steps):
        common = likely.keys() & other_likely.keys()
        assert {token, other} <= common
        assert all(abs(likely[one].logprob - other_likely[one].logprob) < 0.1 for one in common)
        if token != other:
            # Of tokens that nearly tie, any wins, and what follows it is another text.
            return num_equal
    return len(fused.token_ids)
