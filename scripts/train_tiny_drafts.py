"""Train an EAGLE-3 head or an MTP layer that drafts tokens of examples/tiny-llama.

    python -m scripts.train_tiny_drafts --method eagle3 --steps 1200

The text and the held-out files are those of scripts/train_tiny_llama.py. A head learns the
distributions of the target on the text, for the first of `--passes` drafts and, from its own
outputs, for the drafts after it (the training-time test of EAGLE-3, arXiv 2503.01840).
"""

import argparse
import json
import math
import random
import time
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from scripts.train_tiny_llama import encode, is_held_out, library_files, read_documents

TARGET = Path("examples/tiny-llama")
PASS_WEIGHT = 0.8
"""The weight of the loss of a draft, relative to the draft before it."""
DRAFT_VOCAB_SIZE = 1536
LAYER_IDS = (1, 2, 3)
"""The layers of the target with the inputs that an EAGLE-3 head reads."""
INTERMEDIATE_SIZE = 256
LENGTH = 256
PEAK_LEARNING_RATE = 1.5e-3
NUM_WARMUP_STEPS = 50
END_IDS = (0, 1)

TARGET_FILE, MTP_FILE = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))

Keys = list[tuple[Tensor, Tensor]]
"""Keys and values of each pass."""


class Attention(nn.Module):
    """Attention of several passes over the same tokens."""

    def __init__(self, config: Any, input_size: int) -> None:  # Any: a LlamaConfig
        super().__init__()
        size = config.head_dim
        self.size, self.theta = size, config.rope_parameters["rope_theta"]
        hidden_size = config.hidden_size
        self.q_proj = nn.Linear(input_size, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(input_size, config.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(input_size, config.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, hidden_size, bias=False)

    def forward(self, inputs: Tensor, keys: Keys) -> Tensor:
        """Return outputs `[num_windows, num_tokens, hidden_size]`.

        Token i of pass n is at position i + n. It attends to the tokens up to i of the first pass,
        and to token i of the later ones.
        """
        linears = (self.q_proj, self.k_proj, self.v_proj)
        heads = [linear(inputs).unflatten(-1, (-1, self.size)) for linear in linears]
        q, k, v = (one.transpose(1, 2) for one in heads)
        q, k = self._rotated(q, len(keys)), self._rotated(k, len(keys))
        repeats = q.shape[1] // k.shape[1]
        keys.append((k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)))
        (first_k, first_v), *later = keys
        number = inputs.shape[1]
        future = torch.ones(number, number, dtype=torch.bool).triu(1)
        scores = (q @ first_k.mT).masked_fill(future, -math.inf)
        own = [(q * k).sum(-1, keepdim=True) for k, _ in later]
        shares = torch.cat([scores, *own], dim=-1).float().mul(self.size**-0.5).softmax(-1)
        shares = shares.to(first_v.dtype)
        attended = shares[..., :number] @ first_v
        for place, (_, v) in enumerate(later, number):
            attended = attended + shares[..., place : place + 1] * v
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(-2))
        return output

    def _rotated(self, heads: Tensor, first_position: int) -> Tensor:
        half = self.size // 2
        speeds = self.theta ** -(torch.arange(half) / half)
        positions = torch.arange(first_position, first_position + heads.shape[-2])
        angles = positions[:, None] * speeds
        cos, sin = angles.cos(), angles.sin()
        a, b = heads[..., :half], heads[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(heads.dtype)


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return output


def embeddings_of(target: PreTrainedModel) -> Tensor:
    """Return the embeddings, which are also the output head, `[vocab_size, hidden_size]`."""
    table: Tensor = target.get_parameter("model.embed_tokens.weight")
    return table.detach()


class Head(nn.Module):
    """What an EAGLE-3 head and an MTP layer have in common."""

    @abstractmethod
    def first_states(self, states: list[Tensor]) -> Tensor:
        """Return the states of the first pass.

        `states` are the inputs of all layers of the target, and the output of the last.
        """

    @abstractmethod
    def forward(self, embeddings: Tensor, states: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        """Return the logits and the states of the next pass."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the checkpoint."""


class Eagle3Layer(nn.Module):
    """The layer of an EAGLE-3 head."""

    def __init__(self, config: Any) -> None:  # Any: a LlamaConfig
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.self_attn = Attention(config, 2 * size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = Mlp(size, INTERMEDIATE_SIZE)

    def forward(self, embeddings: Tensor, states: Tensor, keys: Keys) -> Tensor:
        pair = (self.input_layernorm(embeddings), self.hidden_norm(states))
        x: Tensor = states + self.self_attn(torch.cat(pair, dim=-1), keys)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Eagle3Head(Head):
    """An EAGLE-3 head of the original format."""

    def __init__(self, target: PreTrainedModel, draft_ids: Tensor) -> None:
        super().__init__()
        self.config: Any = target.config  # Any: a LlamaConfig
        size = self.config.hidden_size
        self.draft_ids = draft_ids
        self.fc = nn.Linear(len(LAYER_IDS) * size, size, bias=False)
        self.midlayer = Eagle3Layer(self.config)
        self.norm = nn.RMSNorm(size, self.config.rms_norm_eps)
        self.lm_head = nn.Linear(size, len(draft_ids), bias=False)
        self.lm_head.weight.data = embeddings_of(target)[draft_ids].clone()

    def first_states(self, states: list[Tensor]) -> Tensor:
        rows: Tensor = self.fc(torch.cat([states[index] for index in LAYER_IDS], dim=-1))
        return rows

    def forward(self, embeddings: Tensor, states: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        outputs = self.midlayer(embeddings, states, keys)
        return self.lm_head(self.norm(outputs)), outputs

    def save(self, folder: Path) -> None:
        tensors = {name: one.bfloat16() for name, one in self.state_dict().items()}
        tensors["d2t"] = self.draft_ids - torch.arange(len(self.draft_ids))
        tensors["t2d"] = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        tensors["t2d"][self.draft_ids] = True
        write(folder, eagle3_config(self.config), tensors, "model.safetensors")


class MtpLayer(nn.Module):
    """A layer of multi-token prediction, as in MiMo."""

    def __init__(self, config: Any) -> None:  # Any: a LlamaConfig
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = nn.RMSNorm(size, eps)
        self.hidden_layernorm = nn.RMSNorm(size, eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.self_attn = Attention(config, size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = Mlp(size, config.intermediate_size)
        self.final_layernorm = nn.RMSNorm(size, eps)

    def forward(self, embeddings: Tensor, states: Tensor, keys: Keys) -> Tensor:
        pair = (self.hidden_layernorm(states), self.token_layernorm(embeddings))
        x = self.input_proj(torch.cat(pair, dim=-1))
        x = x + self.self_attn(self.input_layernorm(x), keys)
        x = x + self.mlp(self.post_attention_layernorm(x))
        output: Tensor = self.final_layernorm(x)
        return output


class MtpHead(Head):
    """An MTP layer that shares the embeddings and the output head of the target."""

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__()
        self.config: Any = target.config  # Any: a LlamaConfig
        self.layer = MtpLayer(self.config)
        # The layer begins as the last layer of the target.
        last = target.model.layers[-1].state_dict()
        self.layer.load_state_dict(last, strict=False)
        self.layer.final_layernorm.load_state_dict(target.model.norm.state_dict())
        eye = torch.eye(self.config.hidden_size)
        self.layer.input_proj.weight.data = torch.cat((eye / 10, eye / 2), dim=1)
        self._table = embeddings_of(target)

    def first_states(self, states: list[Tensor]) -> Tensor:
        return states[-1]

    def forward(self, embeddings: Tensor, states: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        outputs = self.layer(embeddings, states, keys)
        return outputs @ self._table.to(outputs.dtype).T, outputs

    def save(self, folder: Path) -> None:
        prefix = "model.mtp_layers.0."
        layer = self.layer.state_dict().items()
        tensors = {prefix + name: one.bfloat16() for name, one in layer}
        # The architecture has biases, which Llama does not have.
        layers = [f"model.layers.{index}." for index in range(self.config.num_hidden_layers)]
        num_heads = {"q": self.config.num_attention_heads, "k": self.config.num_key_value_heads}
        num_heads["v"] = num_heads["k"]
        for name in (*layers, prefix):
            for part, number in num_heads.items():
                bias = torch.zeros(number * self.config.head_dim, dtype=torch.bfloat16)
                tensors[f"{name}self_attn.{part}_proj.bias"] = bias
        write(folder, mimo_config(self.config), tensors, MTP_FILE)
        write_index(folder)


def shared_config(config: Any) -> dict[str, Any]:  # Any: a LlamaConfig; JSON
    """Return the fields of a checkpoint that are as in its target."""
    names = (
        *("bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size"),
        *("initializer_range", "max_position_embeddings", "num_attention_heads"),
        *("num_key_value_heads", "rms_norm_eps", "vocab_size"),
    )
    fields = {name: getattr(config, name) for name in names}
    return fields | {"rope_theta": config.rope_parameters["rope_theta"], "torch_dtype": "bfloat16"}


def eagle3_config(config: Any) -> dict[str, Any]:  # Any: a LlamaConfig; JSON
    """Return the configuration of an EAGLE-3 head."""
    return shared_config(config) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "intermediate_size": INTERMEDIATE_SIZE,
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "target_hidden_size": config.hidden_size,
        "tie_word_embeddings": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(LAYER_IDS),
            "use_aux_hidden_state": True,
        },
    }


def mimo_config(config: Any) -> dict[str, Any]:  # Any: a LlamaConfig; JSON
    """Return the configuration of the target as a MiMo model."""
    return shared_config(config) | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "num_hidden_layers": config.num_hidden_layers,
        "num_nextn_predict_layers": 1,
        "intermediate_size": config.intermediate_size,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    }


def write_index(folder: Path) -> None:
    """Write the index of an MTP checkpoint whose first file is that of the target."""
    paths = {TARGET_FILE: TARGET / "model.safetensors", MTP_FILE: folder / MTP_FILE}
    files: dict[str, str] = {}
    for name, path in paths.items():
        with safe_open(path, "pt") as file:
            files |= dict.fromkeys(file.keys(), name)
    size = sum(path.stat().st_size for path in paths.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
    text = json.dumps(index, indent=2)
    (folder / "model.safetensors.index.json").write_text(text + "\n")


def write(
    folder: Path,
    config: dict[str, Any],  # Any: JSON
    tensors: dict[str, Tensor],
    name: str,
) -> None:
    """Write a checkpoint to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dict(sorted(config.items())), indent=2)
    (folder / "config.json").write_text(text + "\n")
    tensors = {key: one.contiguous() for key, one in tensors.items()}
    save_file(tensors, folder / name, metadata={"format": "pt"})
    (folder / name).chmod(0o644)


def frequent_ids(tokens: Tensor, vocab_size: int) -> Tensor:
    """Return the ids of the draft vocabulary: the most frequent tokens, and ends, in order."""
    counts = torch.bincount(tokens, minlength=vocab_size)
    counts[list(END_IDS)] = len(tokens)
    return counts.topk(DRAFT_VOCAB_SIZE).indices.sort().values


class Target:
    """The target with its states, which are not trained."""

    def __init__(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model: PreTrainedModel = model.requires_grad_(requires_grad=False)
        self._last = torch.empty(0)
        model.model.norm.register_forward_pre_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: tuple[Tensor]) -> None:
        del module
        self._last = inputs[0]

    @torch.no_grad()
    def run(self, windows: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the states and the log-probabilities of windows of tokens."""
        output = self.model(input_ids=windows, output_hidden_states=True, use_cache=False)
        return [*output.hidden_states[:-1], self._last], output.logits.float().log_softmax(-1)


def losses(
    target: Target, head: Head, windows: Tensor, draft_ids: Tensor, num_passes: int
) -> list[Tensor]:
    """Return the cross-entropy of the drafts of each pass, per token."""
    states, logprobs = target.run(windows)
    probabilities = logprobs[..., draft_ids].exp()
    number = windows.shape[1] - num_passes - 1
    rows = head.first_states([one[:, :number] for one in states])
    table = embeddings_of(target.model)
    keys: Keys = []
    found = []
    for first in range(1, num_passes + 1):
        embeddings = table[windows[:, first : first + number]]
        logits, rows = head(embeddings, rows, keys)
        expected = probabilities[:, first : first + number]
        found.append(-(expected * logits.float().log_softmax(-1)).sum(-1).mean())
    return found


def learning_rate(step: int, num_steps: int) -> float:
    """Return the rate of one step: a warm-up, a plateau and a linear decay from half on."""
    warmed = min(1.0, (step + 1) / NUM_WARMUP_STEPS)
    return PEAK_LEARNING_RATE * min(warmed, 0.02 + 2 * (1 - step / num_steps))


def train(
    target: Target, head: Head, tokens: Tensor, draft_ids: Tensor, arguments: argparse.Namespace
) -> None:
    """Train for the given number of steps."""
    parameters = list(head.parameters())
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    generator = torch.Generator().manual_seed(arguments.seed)
    averages = torch.zeros(arguments.passes)
    start = time.monotonic()
    for step in range(arguments.steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, arguments.steps)
        first = torch.randint(len(tokens) - LENGTH, (arguments.windows, 1), generator=generator)
        with torch.autocast("cpu", torch.bfloat16):
            windows = tokens[first + torch.arange(LENGTH)]
            found = losses(target, head, windows, draft_ids, arguments.passes)
        torch.autograd.backward(
            torch.stack([PASS_WEIGHT**place * loss for place, loss in enumerate(found)]).sum()
        )
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        now = torch.stack(found).detach()
        averages += (now - averages) * max(0.05, 1 / (step + 1))
        if step % 20 == 19:
            shown = " ".join(f"{loss:.3f}" for loss in averages)
            print(f"{step + 1}: {shown}, {time.monotonic() - start:.0f} s", flush=True)
        if step % 200 == 199:
            head.save(arguments.output)


def main() -> None:
    """Train and save a head."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--method", choices=["eagle3", "mtp"], required=True)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--windows", type=int, default=16, help="windows of text in a step")
    parser.add_argument("--passes", type=int, default=5, help="drafts of each token of a window")
    parser.add_argument("--output", type=Path, help="(examples/tiny-llama-METHOD)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.output = arguments.output or TARGET.with_name(f"tiny-llama-{arguments.method}")
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    sources, prose = read_documents([one for one in library_files() if not is_held_out(one)], rng)
    documents = [*sources, *prose]
    rng.shuffle(documents)
    tokens = encode(Tokenizer.from_file(str(TARGET / "tokenizer.json")), documents)
    target = Target(TARGET)
    vocab_size = target.model.config.vocab_size
    draft_ids = torch.arange(vocab_size)
    if arguments.method == "eagle3":
        draft_ids = frequent_ids(tokens, vocab_size)
        share = torch.isin(tokens, draft_ids).float().mean().item()
        print(f"{share:.3f} of the tokens are in the draft vocabulary", flush=True)
        head: Head = Eagle3Head(target.model, draft_ids)
    else:
        head = MtpHead(target.model)
    train(target, head, tokens, draft_ids, arguments)
    head.save(arguments.output)


if __name__ == "__main__":
    main()
