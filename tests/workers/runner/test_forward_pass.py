"""How the forward pass chooses between graphs and eager execution, with graphs that only count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workers.runner.forward_pass import ForwardPass


class CountingGraphs:
    """Can replay steps of up to `limit` tokens, and lacks graphs of some sizes."""

    def __init__(self, name: str, *, limit: int = 0, missing_sizes: tuple[int, ...] = ()) -> None:
        self.name, self.limit = name, limit
        self.missing_sizes = list(missing_sizes)

    def can_replay(self, inputs: SimpleNamespace) -> bool:
        return len(inputs.token_ids) <= self.limit

    def replay(self, inputs: SimpleNamespace, metadata: object) -> str:
        return self.name

    def capture_next(self) -> None:
        self.missing_sizes.pop(0)


def forward_pass(decodes: CountingGraphs | None, pieces: CountingGraphs | None) -> ForwardPass:
    model: Any = SimpleNamespace(forward=lambda *inputs: "eager")  # Any: all that is called
    builder: Any = SimpleNamespace(build=lambda batch: None)  # Any: all that is called
    state: Any = SimpleNamespace(begin_forward=lambda metadata: None)  # Any: all that is called
    graphs: Any = {"decode_graphs": decodes, "piece_graphs": pieces}  # Any: fakes
    return ForwardPass(model, torch.empty(0), builder=builder, state=state, **graphs)


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, "decodes"), (2, "decodes"), (3, "pieces"), (5, "eager")]
)
def test_steps_replay_decode_graphs_before_pieces_and_run_eagerly_without_any(
    num_tokens: int, expected: str
) -> None:
    runs = forward_pass(CountingGraphs("decodes", limit=2), CountingGraphs("pieces", limit=4))
    inputs: Any = SimpleNamespace(  # Any: all that is read
        token_ids=range(num_tokens), positions=None, attention=None, logits_indices=None
    )
    assert runs.hidden_states(inputs) == expected


def test_the_smallest_missing_graph_of_both_kinds_is_captured_next() -> None:
    decodes = CountingGraphs("decodes", missing_sizes=(1, 64))
    pieces = CountingGraphs("pieces", missing_sizes=(16, 32))
    runs = forward_pass(decodes, pieces)
    left = []
    while runs.capture_next():
        left.append((decodes.missing_sizes[:], pieces.missing_sizes[:]))
    assert left == [([64], [16, 32]), ([64], [32]), ([64], []), ([], [])]


def test_a_rank_without_graphs_has_none_to_capture() -> None:
    assert not forward_pass(None, None).capture_next()
