"""BERT and BART against Transformers, over texts of several lengths in one batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attention.dense_reference import relative_error
from tests.workers.models.encoder_reference import (
    BartRun,
    bart_reference,
    bert_reference,
    loaded_bart,
    loaded_bert,
    run_bert,
    save_bart,
    save_bert,
    save_xlm_roberta,
)
from tests.workers.models.two_ranks import on_two_ranks
from workers.parallel.group import SoloGroup

NUM_TOKENS = 20


def test_hidden_states_of_bert_equal_those_of_transformers(tmp_path: Path) -> None:
    save_bert(tmp_path)
    group = SoloGroup()
    outputs = run_bert(loaded_bert(tmp_path, group), group)
    for output, reference in zip(outputs, bert_reference(tmp_path), strict=True):
        assert relative_error(output, reference) < 1e-5


def test_hidden_states_of_xlm_roberta_equal_those_of_transformers(tmp_path: Path) -> None:
    save_xlm_roberta(tmp_path)
    group = SoloGroup()
    outputs = run_bert(loaded_bert(tmp_path, group), group)
    for output, reference in zip(outputs, bert_reference(tmp_path), strict=True):
        assert relative_error(output, reference) < 1e-5


def test_bert_in_bfloat16_is_near_to_float32(tmp_path: Path) -> None:
    save_bert(tmp_path)
    group = SoloGroup()
    outputs = run_bert(loaded_bert(tmp_path, group, "bfloat16"), group)
    for output, reference in zip(outputs, bert_reference(tmp_path), strict=True):
        assert relative_error(output, reference) < 3e-2


@pytest.mark.parametrize("has_scaled_embedding", [False, True])
def test_greedy_tokens_of_bart_equal_those_of_transformers(
    has_scaled_embedding: bool, tmp_path: Path
) -> None:
    save_bart(tmp_path, has_scaled_embedding=has_scaled_embedding)
    group = SoloGroup()
    outputs = BartRun(loaded_bart(tmp_path, group), group).greedy(NUM_TOKENS)
    expected = bart_reference(tmp_path, NUM_TOKENS)
    assert len({token for tokens in expected for token in tokens}) > 10
    assert outputs == expected


def test_two_ranks_of_bert_compute_what_transformers_computes(tmp_path: Path) -> None:
    save_bert(tmp_path)
    reference = bert_reference(tmp_path)
    for outputs in on_two_ranks(lambda group: run_bert(loaded_bert(tmp_path, group), group)):
        for output, expected in zip(outputs, reference, strict=True):
            assert relative_error(output, expected) < 1e-5


def test_two_ranks_of_bart_sample_what_transformers_samples(tmp_path: Path) -> None:
    save_bart(tmp_path, has_scaled_embedding=True)
    expected = bart_reference(tmp_path, NUM_TOKENS)
    outputs = on_two_ranks(
        lambda group: BartRun(loaded_bart(tmp_path, group), group).greedy(NUM_TOKENS)
    )
    assert outputs == [expected, expected]
