"""Draft heads in plain torch: no cache, no batch, and nothing of the product.

Input i of a head is the token after position i and the target's state at position i. Every draft
runs the whole sequence again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from shutil import copy, copytree
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import (
    Glm4MoeDecoderLayer,
    Glm4MoeForCausalLM,
    Glm4MoeRotaryEmbedding,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5ForCausalLM,
    Qwen3_5TextRotaryEmbedding,
)

__all__ = [
    "DraftReference",
    "Eagle3Reference",
    "MtpReference",
    "drafts_of",
    "load_reference",
    "noisy_copy",
    "random_draft_model",
    "random_eagle3_folder",
    "random_glm4_moe_folder",
    "random_mimo_folder",
    "random_qwen3_5_folder",
    "speculators_folder",
    "states_and_logits",
    "whole_mtp_folder",
]

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_HEAD_FIELDS = ("architectures", "draft_vocab_size", "target_hidden_size")
Choose = Callable[[Tensor, int], int]
"""Returns a token for float32 logits `[vocab_size]` and the position of the token."""


class DraftReference(Protocol):
    """A head that drafts one token from each state."""

    def first_states(self, states: list[Tensor]) -> Tensor:
        """Return the first states, `[num_tokens, hidden_size]`, from the target's states.

        `states` are those of `states_and_logits`.
        """

    def run(self, token_ids: Tensor, states: Tensor) -> Tensor:
        """Return the layer's outputs, `[num_tokens, hidden_size]`."""

    def next_states(self, outputs: Tensor) -> Tensor:
        """Return the states that the next draft reads."""

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits of target tokens, `[num_tokens, vocab_size]`, or -inf."""


@torch.inference_mode()
def states_and_logits(target: PreTrainedModel, token_ids: list[int]) -> tuple[list[Tensor], Tensor]:
    """Return the states, each `[num_tokens, hidden_size]`, and the logits of all tokens.

    The states are the inputs of each layer, the output of the last layer, and its normed output.
    """
    outputs: list[Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    output = target(input_ids=torch.tensor([token_ids]), output_hidden_states=True)
    hook.remove()
    *inputs, normed = output.hidden_states
    return [rows[0] for rows in (*inputs, outputs[0], normed)], output.logits[0]


def load_reference(folder: Path, target: PreTrainedModel) -> DraftReference:
    """Return the head in a folder."""
    fields = json.loads((folder / "config.json").read_text())
    eager = fields | {"attn_implementation": "eager"}
    match fields.get("model_type"):
        case "mimo":
            qwen2 = Qwen2Config(**eager)
            return MtpReference(
                target,
                Qwen2DecoderLayer(qwen2, 0),
                Qwen2RotaryEmbedding(qwen2),
                _tensors_of(folder, "model.mtp_layers.0."),
                names=("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
                puts_state_first=True,
                reads_normed=False,
            )
        case "qwen3_5_text":
            types = {"layer_types": ["full_attention"], "num_hidden_layers": 1}
            qwen3_5 = Qwen3_5TextConfig(**eager | types)
            return MtpReference(
                target,
                Qwen3_5DecoderLayer(qwen3_5, 0),
                Qwen3_5TextRotaryEmbedding(qwen3_5),
                _tensors_of(folder, "mtp."),
                prefix="layers.0.",
                names=("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
                offset=1.0,
            )
        case "glm4_moe":
            glm = Glm4MoeConfig(**eager | {"first_k_dense_replace": 0})
            return MtpReference(
                target,
                Glm4MoeDecoderLayer(glm, 0),
                Glm4MoeRotaryEmbedding(glm),
                _tensors_of(folder, f"model.layers.{fields['num_hidden_layers']}."),
                names=("enorm", "hnorm", "eh_proj", "shared_head.norm"),
            )
    return Eagle3Reference(folder, _embedding_of(target))


@torch.inference_mode()
def drafts_of(
    head: DraftReference, states: list[Tensor], token_ids: list[int], number: int, choose: Choose
) -> list[int]:
    """Return drafts of the tokens after `token_ids`.

    `states` are the target's states at all positions but the last, whose token is not computed.
    """
    assert all(len(rows) == len(token_ids) - 1 for rows in states)
    ids, rows = torch.tensor(token_ids[1:]), head.first_states(states)
    for _ in range(number):
        outputs = head.run(ids, rows)
        draft = choose(head.logits(outputs[-1:])[0], len(ids) + 1)
        ids = torch.cat((ids, torch.tensor([draft])))
        rows = torch.cat((rows, head.next_states(outputs[-1:])))
    return ids[len(token_ids) - 1 :].tolist()


class MtpReference:
    """An MTP layer, on transformers' decoder layer of its family."""

    def __init__(
        self,
        target: PreTrainedModel,
        layer: nn.Module,
        rotary: nn.Module,
        weights: dict[str, Tensor],
        *,
        names: tuple[str, str, str, str],
        prefix: str = "",
        offset: float = 0.0,
        puts_state_first: bool = False,
        reads_normed: bool = True,
    ) -> None:
        """`names` are the norms of embeddings and states, the projection and the last norm.

        The weights of `layer` have the `prefix`, and `offset` is added to the weights of norms.
        With `reads_normed`, the first states are the target's normed outputs.
        """
        layer.load_state_dict({name: weights[prefix + name] for name in layer.state_dict()})
        self.layer, self.rotary, self.weights = layer.requires_grad_(False), rotary, weights
        self.embedding = _embedding_of(target)
        self.head: Tensor = target.state_dict()["lm_head.weight"]
        self.names, self.offset, self.eps = names, offset, target.config.rms_norm_eps
        self.puts_state_first, self.reads_normed = puts_state_first, reads_normed

    def first_states(self, states: list[Tensor]) -> Tensor:
        return states[-1] if self.reads_normed else states[-2]

    def run(self, token_ids: Tensor, states: Tensor) -> Tensor:
        token_norm, state_norm, projection, _ = self.names
        pair = [self._norm(token_norm, self.embedding[token_ids]), self._norm(state_norm, states)]
        if self.puts_state_first:
            pair.reverse()
        rows = (torch.cat(pair, dim=-1) @ self.weights[f"{projection}.weight"].T)[None]
        number = len(token_ids)
        future = torch.full((number, number), -torch.inf).triu(1)[None, None]
        positions = torch.arange(number)[None]
        outputs = self.layer(
            rows,
            attention_mask=future,
            position_ids=positions,
            position_embeddings=self.rotary(rows, positions),
        )
        return self._norm(self.names[3], outputs[0])

    def next_states(self, outputs: Tensor) -> Tensor:
        return outputs

    def logits(self, outputs: Tensor) -> Tensor:
        return outputs @ self.head.T

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        return rms_norm(rows, self.weights[f"{name}.weight"] + self.offset, self.eps)


def _embedding_of(target: PreTrainedModel) -> Tensor:
    return target.get_parameter("model.embed_tokens.weight").detach()


def _tensors_of(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint with a prefix, float32, without the prefix."""
    return {
        name.removeprefix(prefix): tensor.float()
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
        if name.startswith(prefix)
    }


class Eagle3Reference:
    """An EAGLE-3 head of the original format or the speculators format."""

    def __init__(self, folder: Path, target_embedding: Tensor) -> None:
        """`target_embedding` is `[vocab_size, hidden_size]`."""
        config = json.loads((folder / "config.json").read_text())
        self._layer = config.get("transformer_layer_config", config)
        ids = config.get("eagle_aux_hidden_state_layer_ids")
        self._layer_ids = ids or config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        flags = config.get("eagle_config", {}) | config
        self._norms_residual = flags.get("norm_before_residual", False)
        self._norms_output = flags.get("norm_output", False)
        self._norms_inputs = flags.get("norm_before_fc", False)
        self._norms_taps = flags.get("fc_norm", False)
        tensors = load_file(folder / "model.safetensors")
        self._weights = {
            name.replace("midlayer.", "layers.0."): tensor.float()
            for name, tensor in tensors.items()
            if tensor.is_floating_point()
        }
        self._weights.setdefault("embed_tokens.weight", target_embedding.float())
        places = tensors["d2t"]
        self.target_ids = torch.arange(len(places)) + places
        self._vocab_size = len(target_embedding)

    def first_states(self, states: list[Tensor]) -> Tensor:
        taps = [states[index].float() for index in self._layer_ids]
        if self._norms_taps:
            taps = [self._norm(f"fc_norm.{place}", rows) for place, rows in enumerate(taps)]
        rows = torch.cat(taps, dim=-1)
        if self._norms_inputs:
            rows = self._norm("input_norm", rows)
        return rows @ self._weights["fc.weight"].T

    def run(self, token_ids: Tensor, states: Tensor) -> Tensor:
        prefix = "layers.0."
        embeddings = self._weights["embed_tokens.weight"][token_ids]
        normed = self._norm(prefix + "hidden_norm", states)
        inputs = torch.cat((self._norm(prefix + "input_layernorm", embeddings), normed), dim=-1)
        residual = normed if self._norms_residual else states
        attended = causal_attention(
            inputs, self._layer, self._products(prefix + "self_attn", "qkvo")
        )
        middle = residual + attended
        inner = self._norm(prefix + "post_attention_layernorm", middle)
        return middle + gated_mlp(inner, self._products(prefix + "mlp", ("gate", "up", "down")))

    def next_states(self, outputs: Tensor) -> Tensor:
        return self._norm("norm", outputs) if self._norms_output else outputs

    def logits(self, outputs: Tensor) -> Tensor:
        scores = self._norm("norm", outputs) @ self._weights["lm_head.weight"].T
        spread = torch.full((len(outputs), self._vocab_size), -torch.inf)
        spread[:, self.target_ids] = scores
        return spread

    def _products(self, prefix: str, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._weights[f"{prefix}.{name}_proj.weight"] for name in names}

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        return rms_norm(rows, self._weights[f"{name}.weight"], self._layer["rms_norm_eps"])


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * weight


def gated_mlp(rows: Tensor, weights: dict[str, Tensor]) -> Tensor:
    gate = functional.silu(rows @ weights["gate"].T)
    return (gate * (rows @ weights["up"].T)) @ weights["down"].T


def causal_attention(
    rows: Tensor,
    config: dict[str, Any],
    weights: dict[str, Tensor],  # Any: a section of JSON
) -> Tensor:
    """Return the outputs of attention over all rows, at positions from 0."""
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    q, k, v = ((rows @ weights[name].T).unflatten(-1, (-1, size)) for name in "qkv")
    rope = config.get("rope_parameters") or config
    q, k = (_rotated(heads, rope["rope_theta"]) for heads in (q, k))
    repeats = q.shape[1] // k.shape[1]
    k, v = (heads.repeat_interleave(repeats, dim=1) for heads in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
    future = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
    shares = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", shares, v).flatten(1) @ weights["o"].T


def _rotated(heads: Tensor, theta: float) -> Tensor:
    """Return `[num_tokens, num_heads, head_size]`, rotated to the positions from 0."""
    half = heads.shape[-1] // 2
    speeds = theta ** -(torch.arange(half) / half)
    angles = (torch.arange(len(heads))[:, None] * speeds)[:, None]
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat(
        (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ),
        dim=-1,
    )


def speculators_folder(folder: Path, destination: Path, target: Path) -> Path:
    """Write a head of the original format in the speculators format, and return its folder."""
    config = json.loads((folder / "config.json").read_text())
    eagle = config.pop("eagle_config")
    layer = {name: value for name, value in config.items() if name not in _HEAD_FIELDS}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    verifier = {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]}
    written = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": None,
        **{flag: eagle.get(flag, False) for flag in _FLAGS},
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": eagle["eagle_aux_hidden_state_layer_ids"],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): one for name, one in tensors.items()}
    return _write(destination, written, renamed)


def random_eagle3_folder(
    destination: Path,
    target: Path,
    *,
    layer_ids: tuple[int, ...],
    draft_vocab_size: int,
    flags: tuple[str, ...] = (),
) -> Path:
    """Write an EAGLE-3 head with random weights for a target like Llama; return its folder.

    Its layer has the heads and sizes of the target's layers. `flags` are the norms of later
    versions: `norm_before_residual`, `norm_before_fc`, `fc_norm` and `norm_output`.
    """
    config = json.loads((target / "config.json").read_text())
    rope = config.pop("rope_parameters", config)
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "rope_theta": rope["rope_theta"],
        "draft_vocab_size": draft_vocab_size,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}
        | dict.fromkeys(flags, True),
    }
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_size = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads = config["num_attention_heads"] * head_size
    kv_heads = config["num_key_value_heads"] * head_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(layer_ids) * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab_size, hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (heads, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv_heads, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv_heads, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
    }
    if "fc_norm" in flags:
        shapes |= {f"fc_norm.{place}.weight": (hidden,) for place in range(len(layer_ids))}
    if "norm_before_fc" in flags:
        shapes["input_norm.weight"] = (len(layer_ids) * hidden,)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        if len(shape) == 2
        else 1 + torch.randn(shape, generator=generator) / 4
        for name, shape in shapes.items()
    }
    target_ids = torch.randperm(config["vocab_size"], generator=generator)[:draft_vocab_size]
    target_ids = target_ids.sort().values
    tensors["d2t"] = target_ids - torch.arange(draft_vocab_size)
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool)
    tensors["t2d"][target_ids] = True
    return _write(destination, config, tensors)


_SMALL: dict[str, Any] = {  # Any: fields of any type
    **{"hidden_size": 48, "intermediate_size": 64, "vocab_size": 131, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 1},
    "max_position_embeddings": 128,
}
_SMALL_STATES = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 8},
}


def random_draft_model(
    destination: Path,
    config: PretrainedConfig,
    target: Path,
) -> Path:
    """Write a draft model with random weights for a target; return its folder."""
    torch.manual_seed(3)
    _save_with_norms(AutoModelForCausalLM.from_config(config), destination)
    copy(target / "tokenizer.json", destination)
    return destination


def noisy_copy(destination: Path, target: Path) -> Path:
    """Write a model whose weights are about those of a target; return its folder."""
    copytree(target, destination)
    generator = torch.Generator().manual_seed(4)
    tensors = load_file(destination / "model.safetensors")
    for name, weight in tensors.items():
        noise = torch.randn(weight.shape, generator=generator)
        tensors[name] = (weight.float() + 0.2 * weight.float().std() * noise).to(weight.dtype)
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    return destination


def random_mimo_folder(destination: Path) -> Path:
    """Write a small MiMo model with random weights; return its folder."""
    config = Qwen2Config(**_SMALL | {"num_hidden_layers": 3})
    torch.manual_seed(2)
    _save_with_norms(Qwen2ForCausalLM(config), destination)
    fields = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "attention_bias": True}
    return _with_mtp(
        destination,
        Qwen2DecoderLayer(config, 0),
        fields | {"num_nextn_predict_layers": 1},
        prefix="model.mtp_layers.0.",
        layer_prefix="model.mtp_layers.0.",
        norms=("token_layernorm", "hidden_layernorm", "final_layernorm"),
        projection="input_proj",
    )


def random_glm4_moe_folder(destination: Path) -> Path:
    """Write a small GLM-4.5 with random weights; return its folder."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Glm4MoeConfig(
        **_SMALL | experts | {"num_hidden_layers": 2, "first_k_dense_replace": 1}
    )
    torch.manual_seed(5)
    _save_with_norms(Glm4MoeForCausalLM(config), destination)
    return _with_mtp(
        destination,
        Glm4MoeDecoderLayer(config, 1),
        {},
        prefix="model.layers.2.",
        layer_prefix="model.layers.2.",
        norms=("enorm", "hnorm", "shared_head.norm"),
        projection="eh_proj",
    )


def random_qwen3_5_folder(destination: Path, layer_types: tuple[str, ...]) -> Path:
    """Write a small Qwen3.5 with random weights; return its folder."""
    types = {"layer_types": list(layer_types), "num_hidden_layers": len(layer_types)}
    torch.manual_seed(3)
    config = Qwen3_5TextConfig(**_SMALL | _SMALL_STATES | types)
    _save_with_norms(Qwen3_5ForCausalLM(config), destination)
    alone = {"layer_types": ["full_attention"], "num_hidden_layers": 1}
    return _with_mtp(
        destination,
        Qwen3_5DecoderLayer(Qwen3_5TextConfig(**_SMALL | alone), 0),
        {"mtp_num_hidden_layers": 1},
        prefix="mtp.",
        layer_prefix="mtp.layers.0.",
        norms=("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
        projection="fc",
    )


def _save_with_norms(model: PreTrainedModel, folder: Path) -> None:
    """Save a model with a last norm that has random weights, unlike a new model."""
    weight = model.get_parameter("model.norm.weight")
    weight.data += torch.randn(weight.shape) / 2
    model.save_pretrained(folder)


def _with_mtp(
    folder: Path,
    layer: nn.Module,
    fields: dict[str, Any],  # Any: JSON
    *,
    prefix: str,
    layer_prefix: str,
    norms: tuple[str, ...],
    projection: str,
) -> Path:
    """Add a random MTP layer to a checkpoint, and fields to its configuration."""
    config = json.loads((folder / "config.json").read_text()) | fields
    size = config["hidden_size"]
    tensors = {f"{prefix}{norm}.weight": torch.rand(size) for norm in norms}
    tensors[f"{prefix}{projection}.weight"] = torch.randn(size, 2 * size) * size**-0.5
    for name, weight in layer.state_dict().items():
        scale = 0.3 if weight.dim() == 1 else weight.shape[-1] ** -0.5
        tensors[layer_prefix + name] = torch.randn(weight.shape) * scale
    return _write(folder, config, load_file(folder / "model.safetensors") | tensors)


def whole_mtp_folder(destination: Path, layer: Path, target: Path) -> Path:
    """Copy a target and the MTP layer for it to one folder, and return the folder."""
    copytree(layer, destination)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        copy(target / name, destination)
    copy(target / "model.safetensors", destination / "model-00001-of-00002.safetensors")
    return destination


def _write(
    folder: Path,
    config: dict[str, Any],  # Any: JSON
    tensors: dict[str, Tensor],
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
