"""How texts are shared out over steps, and what the death of a rank does to them."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from cluster.embedder import Embedder
from pagedray.batch import EmbedOutput, EmbedPlan
from pagedray.config import EngineConfig, ModelConfig, SchedulerConfig
from pagedray.errors import EngineError, WorkerError
from tests.fakes import FakeExecutor

MODEL = ModelConfig(
    name="tiny",
    folder=Path("tiny"),
    architecture="BertModel",
    vocab_size=50,
    hidden_size=2,
    intermediate_size=4,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_size=2,
    max_positions=20,
    num_token_types=2,
)


class CountingExecutor(FakeExecutor):
    """Gives each text its length and its first token."""

    def __init__(self, *, num_failures: int = 0) -> None:
        super().__init__()
        self.plans: list[EmbedPlan] = []
        self._num_failures = num_failures

    def embed(self, plan: EmbedPlan) -> EmbedOutput:
        self.plans.append(plan)
        if self._num_failures:
            self._num_failures -= 1
            raise WorkerError("A rank died.")
        numbers = [number for ids in plan.token_ids for number in (len(ids), ids[0])]
        return EmbedOutput(plan.step, array("f", numbers).tobytes())


def embedder(executor: CountingExecutor, scheduler: SchedulerConfig | None = None) -> Embedder:
    config = EngineConfig(model=MODEL, scheduler=scheduler or SchedulerConfig())
    return Embedder(config, executor, Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))


def test_steps_hold_what_the_token_budget_allows_and_vectors_keep_their_order() -> None:
    executor = CountingExecutor()
    texts = [[first] * length for first, length in enumerate((3, 12, 1, 4, 3, 11))]
    vectors = embedder(executor, SchedulerConfig(max_num_batched_tokens=11)).embed(
        texts, "mean", is_normalized=False
    )
    assert vectors == [[float(len(ids)), float(ids[0])] for ids in texts]
    lengths = [[len(ids) for ids in plan.token_ids] for plan in executor.plans]
    assert lengths == [[1, 3, 3, 4], [11], [12]]
    assert [plan.step for plan in executor.plans] == [0, 1, 2]


def test_steps_hold_no_more_texts_than_rows() -> None:
    executor = CountingExecutor()
    embedder(executor, SchedulerConfig(max_num_seqs=2)).embed([[1]] * 5, "cls", is_normalized=True)
    assert [len(plan.token_ids) for plan in executor.plans] == [2, 2, 1]


def test_texts_go_to_new_ranks_when_the_old_ones_die() -> None:
    executor = CountingExecutor(num_failures=1)
    assert embedder(executor).embed([[7, 7]], "mean", is_normalized=False) == [[2.0, 7.0]]
    assert executor.num_restarts == 1
    assert [plan.step for plan in executor.plans] == [0, 0]


def test_texts_that_end_two_groups_are_given_up() -> None:
    executor = CountingExecutor(num_failures=2)
    engine = embedder(executor)
    with pytest.raises(EngineError, match="could not be embedded: A rank died"):
        engine.embed([[7]], "mean", is_normalized=False)
    assert engine.embed([[7]], "mean", is_normalized=False) == [[1.0, 7.0]]
