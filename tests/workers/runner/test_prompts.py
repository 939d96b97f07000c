"""Starts with the prompt of another row."""

from pagedray.batch import SequenceStart, pack_token_ids
from pagedray.sampling_params import SamplingParams
from workers.runner.prompts import Prompts


def make_start(row: int, token_ids: list[int], *, donor_row: int = -1) -> SequenceStart:
    return SequenceStart(
        row, pack_token_ids(token_ids), 3, [], SamplingParams(), 0, row, donor_row=donor_row
    )


def test_start_with_a_donor_has_its_prompt() -> None:
    prompts = Prompts()
    prompts.complete_starts([make_start(0, [1, 2, 3, 4])])
    (start,) = prompts.complete_starts([make_start(1, [], donor_row=0)])
    assert (start.row, start.token_ids, start.donor_row) == (1, pack_token_ids([1, 2, 3]), -1)
    # A fork may be a donor too.
    (start,) = prompts.complete_starts([make_start(2, [], donor_row=1)])
    assert start.token_ids == pack_token_ids([1, 2, 3])


def test_row_of_a_donor_may_be_taken_by_a_later_start_of_the_plan() -> None:
    prompts = Prompts()
    prompts.complete_starts([make_start(0, [1, 2, 3])])
    starts = [
        make_start(1, [], donor_row=0),
        make_start(0, [7, 8, 9]),
        make_start(2, [], donor_row=0),
    ]
    completed = prompts.complete_starts(starts)
    assert [start.token_ids for start in completed] == list(
        map(pack_token_ids, ([1, 2, 3], [7, 8, 9], [7, 8, 9]))
    )


def test_starts_of_one_donor_share_its_tokens() -> None:
    prompts = Prompts()
    prompts.complete_starts([make_start(0, [1, 2, 3])])
    first, last = prompts.complete_starts([make_start(row, [], donor_row=0) for row in (1, 2)])
    assert first.token_ids is last.token_ids
