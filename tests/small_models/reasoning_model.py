"""The tiny model with a token that ends its reasoning, and a template that begins it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

_TINY_LLAMA = Path(__file__).parents[2] / "examples" / "tiny-llama"
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "<|assistant|>{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}"
)

END_TOKEN_ID = 3071
"""The token of `</think>`, the last one of the vocabulary."""


def write_reasoning_model(folder: Path) -> None:
    """Write the model to an empty folder."""
    for path in _TINY_LLAMA.iterdir():
        if path.name != "tokenizer.json":
            shutil.copy(path, folder)
    tokenizer = json.loads((_TINY_LLAMA / "tokenizer.json").read_text())
    model = tokenizer["model"]
    (last,) = (token for token, token_id in model["vocab"].items() if token_id == END_TOKEN_ID)
    del model["vocab"][last]
    model["merges"] = [merge for merge in model["merges"] if "".join(merge) != last]
    added = {**tokenizer["added_tokens"][0], "id": END_TOKEN_ID, "content": "</think>"}
    tokenizer["added_tokens"].append({**added, "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
