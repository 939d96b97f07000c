"""A checkpoint that says given texts: in each turn of a conversation the next one."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

_TINY_LLAMA = Path(__file__).parents[2] / "examples" / "tiny-llama"
_HIDDEN_SIZE = 128
_INTERMEDIATE_SIZE = 16
_CONTEXT = 2**16
_EOS_TOKEN_ID = 1
_TEMPLATE = (
    "{#- Calls of tools are <tool_call> objects. -#}"
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|end|>{% endfor %}"
    "<|turn_{{ messages | selectattr('role', 'equalto', 'assistant') | list | length }}|>"
)


def write_scripted_model(folder: Path, turns: Sequence[Sequence[str]]) -> None:
    """Write a model to an empty folder that says `turns[k]` after `k` turns of the assistant.

    The pieces of a turn are tokens, hence all of them must differ.
    """
    pieces = [piece for turn in turns for piece in turn]
    assert len(set(pieces)) == len(pieces)
    tokenizer = json.loads((_TINY_LLAMA / "tokenizer.json").read_text())
    next_id = _vocabulary_size(tokenizer)
    successors: dict[int, int] = {}
    for index, turn in enumerate(turns):
        texts = [f"<|turn_{index}|>", *turn]
        token_ids = list(range(next_id, next_id + len(texts)))
        next_id += len(texts)
        for position, (token_id, text) in enumerate(zip(token_ids, texts, strict=True)):
            added = {**tokenizer["added_tokens"][0], "id": token_id, "content": text}
            tokenizer["added_tokens"].append({**added, "special": position == 0})
        successors.update(zip(token_ids, [*token_ids[1:], _EOS_TOKEN_ID], strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((_TINY_LLAMA / "config.json").read_text())
    config |= {
        "hidden_size": _HIDDEN_SIZE,
        "intermediate_size": _INTERMEDIATE_SIZE,
        "max_position_embeddings": _CONTEXT,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "vocab_size": next_id,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    shutil.copy(_TINY_LLAMA / "tokenizer_config.json", folder)
    save_file(_weights(next_id, successors, config["head_dim"]), folder / "model.safetensors")


def _vocabulary_size(tokenizer: dict[str, dict[str, dict[str, int]]]) -> int:
    return max(tokenizer["model"]["vocab"].values()) + 1


def _weights(
    vocabulary_size: int, successors: dict[int, int], head_size: int
) -> dict[str, torch.Tensor]:
    """Return weights whose layer adds nothing: a token alone decides on the next one."""
    embeddings = torch.randn(
        vocabulary_size, _HIDDEN_SIZE, generator=torch.Generator().manual_seed(0)
    )
    head = torch.zeros(vocabulary_size, _HIDDEN_SIZE)
    for token_id, successor in successors.items():
        head[successor] += embeddings[token_id]
    layer = "model.layers.0"
    weights = {
        "model.embed_tokens.weight": embeddings,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(_HIDDEN_SIZE),
        f"{layer}.input_layernorm.weight": torch.ones(_HIDDEN_SIZE),
        f"{layer}.post_attention_layernorm.weight": torch.ones(_HIDDEN_SIZE),
        f"{layer}.self_attn.q_proj.weight": torch.zeros(2 * head_size, _HIDDEN_SIZE),
        f"{layer}.self_attn.k_proj.weight": torch.zeros(head_size, _HIDDEN_SIZE),
        f"{layer}.self_attn.v_proj.weight": torch.zeros(head_size, _HIDDEN_SIZE),
        f"{layer}.self_attn.o_proj.weight": torch.zeros(_HIDDEN_SIZE, 2 * head_size),
        f"{layer}.mlp.gate_proj.weight": torch.zeros(_INTERMEDIATE_SIZE, _HIDDEN_SIZE),
        f"{layer}.mlp.up_proj.weight": torch.zeros(_INTERMEDIATE_SIZE, _HIDDEN_SIZE),
        f"{layer}.mlp.down_proj.weight": torch.zeros(_HIDDEN_SIZE, _INTERMEDIATE_SIZE),
    }
    return {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
