"""The captures of a rank, and steps without one after a failure."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attention.abstract import AttentionBatch
from attention.kernels.arguments import Segments
from pagedray.rank_progress import ProgressWord, RankReport
from workers.runner.decode_graphs import ChainGraphs, DecodeGraphs, chain_sizes
from workers.runner.step_graphs import Captures

SIZES = [1, 2, 4, 8]


class Gpu:
    """Captures sizes as text, for as long as it has memory."""

    def __init__(self, num_captures: int = 100) -> None:
        self.num_captures = num_captures
        self.captured: list[int] = []

    def capture(self, size: int) -> str:
        if len(self.captured) == self.num_captures:
            raise RuntimeError("CUDA out of memory.\nSee the documentation.")
        self.captured.append(size)
        return f"graph {size}"


def make_captures(gpu: Gpu, progress: ProgressWord, *, may_lack: bool = True) -> Captures[str]:
    return Captures(SIZES, gpu.capture, progress=progress, may_lack=may_lack)


def num_uncaptured(progress: ProgressWord) -> int:
    return RankReport.from_cells(progress.cells()).num_uncaptured


def test_the_largest_is_captured_first_and_others_by_size_or_when_a_step_needs_them() -> None:
    gpu = Gpu()
    captures = make_captures(gpu, ProgressWord())
    assert not captures.are_any
    captures.capture_all(only_largest=True)
    assert captures.are_any
    assert captures.find(3) == (4, "graph 4")
    assert captures.find(4) == (4, "graph 4")
    captures.capture_next()
    assert captures.missing_sizes == [2]
    captures.capture_all(only_largest=False)
    assert gpu.captured == [8, 4, 1, 2]
    assert captures.missing_sizes == []


def test_after_a_failure_missing_sizes_have_no_graph_and_captured_ones_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpu, progress = Gpu(2), ProgressWord()
    captures = make_captures(gpu, progress)
    captures.capture_all(only_largest=True)
    captures.capture_next()
    captures.capture_next()
    # Memory is free again, but a rank that fails and succeeds by turns would pause again and again.
    gpu.num_captures = 100
    assert captures.missing_sizes == []
    assert [captures.find(size) for size in SIZES] == [
        (1, "graph 1"),
        None,
        None,
        (8, "graph 8"),
    ]
    assert num_uncaptured(progress) == 2
    assert caplog.messages == [
        "Could not capture the CUDA graph of size 2; steps of 2 sizes run without graphs and are "
        "slower: CUDA out of memory."
    ]


def test_a_step_whose_graph_cannot_be_captured_runs_without_it() -> None:
    progress = ProgressWord()
    captures = make_captures(Gpu(1), progress)
    captures.capture_all(only_largest=True)
    assert captures.find(1) is None
    assert num_uncaptured(progress) == 3
    # Graphs of another kind may fail too.
    other = make_captures(Gpu(0), progress)
    other.capture_next()
    assert num_uncaptured(progress) == 7
    progress.begin_captures()
    assert num_uncaptured(progress) == 0


def test_a_failure_before_the_first_step_is_raised() -> None:
    captures = make_captures(Gpu(1), ProgressWord())
    captures.capture_all(only_largest=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        captures.capture_all(only_largest=False)


def test_one_of_several_ranks_raises_at_a_step_too() -> None:
    # The others would run the step padded, and this one would not.
    captures = make_captures(Gpu(1), ProgressWord(), may_lack=False)
    captures.capture_all(only_largest=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        captures.find(1)
    with pytest.raises(RuntimeError, match="out of memory"):
        captures.capture_next()


@pytest.mark.parametrize(("num_decodes", "size"), [(2, 5), (4, 5), (5, 5), (8, 8), (9, None)])
def test_chains_replay_no_graph_that_writes_tokens_while_it_reads_others(
    num_decodes: int, size: int | None
) -> None:
    # Not made by its constructor, which needs a GPU.
    graphs = object.__new__(DecodeGraphs)
    graphs._sizes = [1, 2, 4, 8]
    for has_chains, expected in ((True, size), (False, num_decodes if size else None)):
        batch = AttentionBatch(
            num_prefills=0,
            query_lens=np.ones(num_decodes, dtype=np.int32),
            seq_lens=np.ones(num_decodes, dtype=np.int32),
            block_tables=np.zeros((num_decodes, 1), dtype=np.int32),
            slot_mapping=np.zeros(num_decodes, dtype=np.int64),
            has_chains=has_chains,
        )
        inputs: Any = SimpleNamespace(  # Any: in place of StepInputs
            attention=batch, token_ids=torch.zeros(num_decodes), has_kept_states=False
        )
        assert graphs._fits(inputs) == (expected is not None)
        if expected is not None:
            assert graphs._sizes_of(inputs) == (expected,)


def test_few_sizes_of_chains_are_captured() -> None:
    assert chain_sizes([1, 2, 4, 8, 16, 24, 32, 40]) == [8, 16, 32, 40]
    assert chain_sizes([1, 2, 4, 6]) == [6]
    assert chain_sizes([1, 2, 4]) == []


def test_padding_of_chains_is_a_segment_without_a_row() -> None:
    # Not made by its constructor, which needs a GPU.
    graphs = object.__new__(ChainGraphs)
    # An earlier step had more rows.
    graphs._rows = torch.arange(8, dtype=torch.int32)
    graphs._starts = torch.arange(9, dtype=torch.int32)
    segments = Segments(
        query_starts=torch.tensor([0, 3, 4, 6], dtype=torch.int32),
        rows=torch.tensor([5, 2, 7], dtype=torch.int32),
        max_query_len=3,
        is_chained=True,
        keeps_states=True,
    )
    graphs._set_segments(segments, 8)
    padded = graphs._segments(8)
    assert padded.spans() == segments.spans() == [(5, 0, 3), (2, 3, 4), (7, 4, 6)]
    assert padded.query_starts.tolist() == [0, 3, 4, 6, 8, 8, 8, 8, 8]
    # The second draft of the first chain is wrong, and so is the only draft of the last.
    token_ids = torch.tensor([10, 11, 12, 20, 30, 31, 99, 99])
    sampled_ids = torch.tensor([11, 13, 14, 21, 32, 33, 99, 99])
    accepted = padded.accepted(token_ids, sampled_ids)
    assert accepted.spans() == [(5, 0, 2), (2, 3, 4), (7, 4, 5)]
    assert accepted.query_starts[-1] == 8
    assert not accepted.keeps_states
