"""The model in examples/tiny-llama: complete, small, loadable, and trained."""

import json
import math
from pathlib import Path

import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.train_tiny_llama import is_held_out

FOLDER = Path(__file__).parents[1] / "examples" / "tiny-llama"
CONVERSATION = [
    {"role": "user", "content": "What is deque?"},
    {"role": "assistant", "content": "A list-like sequence."},
    {"role": "user", "content": "What does deque.rotate do?"},
]
RENDERED = (
    "<|endoftext|><|user|>\nWhat is deque?<|end|>\n"
    "<|assistant|>\nA list-like sequence.<|end|>\n"
    "<|user|>\nWhat does deque.rotate do?<|end|>\n"
    "<|assistant|>\n"
)
# From the docstrings of statistics.py, which the training never saw.
HELD_OUT_FILE = "statistics.py"
HELD_OUT_TEXT = '''\
    """Return the median (middle value) of numeric data.

    When the number of data points is odd, return the middle data point.
    When the number of data points is even, the median is interpolated by
    taking the average of the two middle values:

    >>> median([1, 3, 5])
    3
    >>> median([1, 3, 5, 7])
    4.0

    """
    data = sorted(data)
    n = len(data)
    if n == 0:
        raise StatisticsError("no median for empty data")
    if n % 2 == 1:
        return data[n // 2]
'''


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_folder_is_complete_and_small() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sizes.keys() == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sizes["model.safetensors"] <= 8_000_000
    assert sum(sizes.values()) <= 8_500_000


def test_config_suits_two_and_four_ranks() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"]
    assert config["max_position_embeddings"] == 1024
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["num_key_value_heads"] % 4 == config["num_attention_heads"] % 4 == 0


def test_tokenizer_returns_any_text_unchanged(tokenizer: Tokenizer) -> None:
    text = HELD_OUT_TEXT + "\t\u00e9\u4f60\U0001f600\r\n"
    assert tokenizer.get_vocab_size() >= 2000
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_held_out_text_is_predicted_far_better_than_by_chance(tokenizer: Tokenizer) -> None:
    token_ids = torch.tensor([tokenizer.encode(HELD_OUT_TEXT).ids])
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16)
    with torch.inference_mode():
        logits = model(input_ids=token_ids[:, :-1]).logits[0].float()
    loss = functional.cross_entropy(logits, token_ids[0, 1:]).item()
    assert is_held_out(HELD_OUT_FILE)
    assert loss < 0.6 * math.log(tokenizer.get_vocab_size())


def test_chat_template_renders_roles_as_single_tokens() -> None:
    hf_tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    rendered = hf_tokenizer.apply_chat_template(
        CONVERSATION, add_generation_prompt=True, tokenize=False
    )
    assert rendered == RENDERED
    assert hf_tokenizer.encode("<|end|><|user|>", add_special_tokens=False) == [1, 3]


def test_chat_template_renders_in_a_plain_sandbox() -> None:
    settings = json.loads((FOLDER / "tokenizer_config.json").read_text())
    template = ImmutableSandboxedEnvironment().from_string(settings["chat_template"])
    rendered = template.render(
        messages=CONVERSATION, add_generation_prompt=True, bos_token=settings["bos_token"]
    )
    assert rendered == RENDERED
