"""The references of draft heads: both formats of EAGLE-3 say the same."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.workers.draft_reference import (
    Eagle3Reference,
    drafts_of,
    random_eagle3_folder,
    speculators_folder,
    states_and_logits,
)

TARGET = Path(__file__).parents[2] / "examples" / "tiny-llama"
TOKEN_IDS = [0, 40, 41, 300, 2100, 7, 7, 512, 90, 1000]
NUM_DRAFTS = 4


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    return model


def likeliest(logits: Tensor, position: int) -> int:
    del position
    return int(logits.argmax())


@pytest.mark.parametrize("flags", [(), ("fc_norm", "norm_output"), ("norm_before_fc",)], ids=str)
def test_both_formats_of_eagle3_draft_the_same_tokens(
    target: PreTrainedModel, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    original = random_eagle3_folder(
        tmp_path / "original", TARGET, layer_ids=(0, 2, 3), draft_vocab_size=500, flags=flags
    )
    renamed = speculators_folder(original, tmp_path / "speculators", TARGET)
    embedding = target.get_parameter("model.embed_tokens.weight").detach()
    states, _ = states_and_logits(target, TOKEN_IDS[:-1])
    heads = [Eagle3Reference(folder, embedding) for folder in (original, renamed)]
    drafts = [drafts_of(head, states, TOKEN_IDS, NUM_DRAFTS, likeliest) for head in heads]
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) == NUM_DRAFTS
    assert set(drafts[0]) <= set(heads[0].target_ids.tolist())
