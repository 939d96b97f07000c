"""Inputs of a step: batches, tables of tokens, prompts and random plans."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attention.abstract import AttentionBatch
from pagedray.batch import (
    Decodes,
    SequencePlan,
    SequenceStart,
    StateSave,
    StepPlan,
    pack_token_ids,
)
from pagedray.sampling_params import SamplingParams
from tests.workers.devices import DEVICES
from workers.runner.forward_pass import ForwardPass
from workers.runner.input_batch import InputBatch, StepInputs
from workers.runner.model_runner import Prompts
from workers.runner.token_table import TokenTable

PROMPTS = {3: [11, 12, 13], 0: [21, 22], 2: [31, 32, 33, 34]}
GREEDY = SamplingParams(temperature=0.0)
NUM_ROWS, MAX_MODEL_LEN = 7, 30
NUM_ROWS_AT_RANDOM, MAX_LEN = 6, 40
Place = tuple[int, int]
"""A row and a position."""


def inputs_of(plans: Sequence[StepPlan]) -> list[dict[str, Any]]:  # Any: fields of StepInputs
    """Return the inputs of steps after the prompts of rows 3, 0 and 2; each samples 40 + row."""
    table = TokenTable(
        max_num_rows=4, max_model_len=16, max_num_tokens=16, device=torch.device("cpu")
    )
    batch = InputBatch(table, max_num_rows=4, max_model_len=16, block_size=2, replays_decodes=True)
    starts = [
        SequenceStart(
            row, pack_token_ids(prompt), len(prompt), [2 * row, 2 * row + 1], SamplingParams(), 0, 0
        )
        for row, prompt in PROMPTS.items()
    ]
    chunks = [SequencePlan(row, 0, len(prompt), True) for row, prompt in PROMPTS.items()]
    found = []
    for plan in (StepPlan(0, chunks, starts), *plans):
        batch.apply_plan(plan)
        inputs = batch.prepare_inputs(plan)
        batch.append_sampled(inputs, torch.tensor([40 + row for row in inputs.sampled_rows]))
        found.append(asdict(inputs))
    return found[1:]


def test_decodes_give_the_inputs_of_chunks_of_one_token() -> None:
    start = SequenceStart(1, pack_token_ids([51, 52, 53]), 3, [8, 9], SamplingParams(), 0, 0)
    chunk = SequencePlan(1, 0, 3, True)
    plans = [
        StepPlan(1, [], decodes=Decodes.pack([3, 0, 2], [3, 2, 4], [2], [10])),
        StepPlan(2, [chunk], [start], Decodes.pack([3, 2], [4, 5], [3], [11])),
        StepPlan(3, [], decodes=Decodes.pack([0, 3, 2, 1], [3, 5, 6, 3], [2], [12])),
    ]
    fast = inputs_of(plans)
    plain = inputs_of([StepPlan(plan.step, plan.sequences, plan.starts) for plan in plans])
    for ours, theirs in zip(fast, plain, strict=True):
        torch.testing.assert_close(ours, theirs)
    last = fast[-1]
    assert last["token_ids"].tolist() == [40, 43, 42, 41]
    assert last["sampled_rows"].tolist() == [0, 3, 2, 1]
    assert last["sampled_positions"].tolist() == [4, 6, 7, 4]
    assert last["attention"]["block_tables"].tolist() == [
        [0, 1, 0, 0],
        [6, 7, 11, 0],
        [4, 5, 10, 12],
        [8, 9, 0, 0],
    ]


def test_states_are_saved_before_tokens_of_the_step() -> None:
    table = TokenTable(
        max_num_rows=4, max_model_len=300, max_num_tokens=600, device=torch.device("cpu")
    )
    batch = InputBatch(
        table,
        max_num_rows=4,
        max_model_len=300,
        block_size=64,
        replays_decodes=False,
        has_states=True,
        num_spare_states=4,
    )
    chunks = [SequencePlan(2, 0, 200, False), SequencePlan(1, 64, 80, False)]
    saves = [StateSave(1, 128), StateSave(2, 128), StateSave(2, 64)]
    segments = batch.prepare_inputs(StepPlan(0, chunks, saves=saves)).segments
    assert segments is not None
    assert segments.save_ends is not None
    assert segments.save_ends.tolist() == [264, 128, 64, -1]


@pytest.mark.parametrize("device", DEVICES)
def test_every_step_of_decodes_has_the_segments_of_its_rows(device: str) -> None:
    table = TokenTable(
        max_num_rows=4, max_model_len=16, max_num_tokens=16, device=torch.device(device)
    )
    batch = InputBatch(
        table,
        max_num_rows=4,
        max_model_len=16,
        block_size=2,
        replays_decodes=False,
        has_states=True,
    )
    plain, chained = [0, 1, 2], [0, 1, 3]
    for rows, starts in (
        ([3, 1], plain),
        ([3, 1], plain),
        ([1, 3], plain),
        ([2, 1, 1], chained),
        ([2, 1, 1], chained),
        ([3, 1], plain),
    ):
        is_chained = starts == chained
        decodes = Decodes.pack(rows, [*range(len(rows))], draft_ids=[9] if is_chained else [])
        segments = batch.prepare_inputs(StepPlan(0, [], decodes=decodes)).segments
        assert segments is not None
        assert segments.rows.tolist() == rows[:2]
        assert segments.query_starts.tolist() == starts
        assert segments.is_chained == segments.keeps_states == is_chained


@pytest.mark.parametrize("device", DEVICES)
def test_chains_are_decodes_of_their_drafts(device: str) -> None:
    table = TokenTable(
        max_num_rows=9, max_model_len=16, max_num_tokens=16, device=torch.device(device)
    )
    batch = InputBatch(table, max_num_rows=9, max_model_len=16, block_size=2, replays_decodes=True)
    starts = [
        SequenceStart(row, pack_token_ids([9, row, 8]), 3, [2 * row, 2 * row + 1], GREEDY, 0, 0)
        for row in range(4)
    ]
    # Row 2 has four drafts and two more blocks, row 0 has a draft; a prompt comes first.
    chunk = SequencePlan(3, 0, 3, True)
    decodes = Decodes.pack(
        [1, 2, 2, 2, 2, 2, 0, 0], [2, 2, 3, 4, 5, 6, 2, 3], [2, 2], [10, 11], [21, 22, 23, 24, 25]
    )
    for chunks in ([], [chunk]):
        plan = StepPlan(0, chunks, starts, decodes)
        batch.apply_plan(plan)
        inputs = batch.prepare_inputs(plan)
        first = 3 * len(chunks)
        assert inputs.token_ids.tolist()[first:] == [8, 8, 21, 22, 23, 24, 8, 25]
        assert inputs.positions.tolist()[first:] == [2, 2, 3, 4, 5, 6, 2, 3]
        assert inputs.attention.slot_mapping.tolist()[first:] == [6, 10, 11, 20, 21, 22, 2, 3]
        assert inputs.draft_ids is not None
        assert inputs.draft_ids.tolist()[len(chunks) :] == [-1, -1, 21, 22, 23, 24, -1, 25]
        assert len(inputs.draft_ids) == len(inputs.sampled_rows)
        batch.append_sampled(inputs, torch.arange(50, 50 + len(inputs.sampled_rows), device=device))
        assert next(one.new_block_ids for one in plan.sequences if one.row == 2) == (10, 11)
    # The row goes on behind its second draft; later tokens are overwritten.
    plan = StepPlan(1, [], decodes=Decodes.pack([2, 2], [4, 5], draft_ids=[31]))
    batch.apply_plan(plan)
    assert batch.prepare_inputs(plan).token_ids.tolist() == [53, 31]


@pytest.mark.parametrize("device", DEVICES)
def test_steps_read_prompts_and_sampled_tokens_of_many_rows(device: str) -> None:
    table = TokenTable(
        max_num_rows=NUM_ROWS,
        max_model_len=MAX_MODEL_LEN,
        max_num_tokens=64,
        device=torch.device(device),
    )
    rng = random.Random(5)
    truth: dict[int, list[int]] = {}
    outputs: list[tuple[torch.Tensor, list[int]]] = []
    for _ in range(200):
        rows = [row for row in range(NUM_ROWS) if len(truth.get(row, [])) < MAX_MODEL_LEN]
        started = [row for row in range(NUM_ROWS) if row not in rows or rng.random() < 0.1]
        prompts = [[rng.randrange(1000) for _ in range(rng.randint(1, 20))] for _ in started]
        if started:
            donors = [
                rng.choice(sorted(truth)) if truth and rng.random() < 0.3 else -1 for _ in started
            ]
            before = dict(truth)
            for number, (row, donor) in enumerate(zip(started, donors, strict=True)):
                if donor >= 0:
                    prompts[number] = before[donor][: rng.randint(1, 20)]
                before[row] = prompts[number]
            table.start_rows(started, [pack_token_ids(prompt) for prompt in prompts], donors)
        truth.update(zip(started, (list(p) for p in prompts), strict=True))
        used = rng.sample(sorted(truth), rng.randint(1, len(truth))) if truth else []
        if not used:
            continue
        places = [(row, p) for row in used for p in range(len(truth[row]))][:64]
        token_ids, positions, (ends, sampled) = table.begin_step(
            np.array([row for row, _ in places]),
            np.array([position for _, position in places]),
            np.array([len(truth[row]) for row in used]),
            np.array(used),
        )
        assert token_ids.tolist() == [truth[row][position] for row, position in places]
        assert positions.tolist() == [position for _, position in places]
        tokens = [rng.randrange(-1, 1000) for _ in used]
        output = table.append(sampled, ends, torch.tensor(tokens, device=device))
        outputs = [*outputs[-2:], (output, tokens)]
        for row, token in zip(used, tokens, strict=True):
            truth[row].append(max(token, 0))
            assert table.tokens(row, 0, len(truth[row])).tolist() == truth[row]
        # `tolist` of the table has waited for the device.
        assert all(host.tolist() == expected for host, expected in outputs)


@pytest.mark.gpu
def test_a_step_on_a_gpu_begins_where_graphs_read() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    table = TokenTable(
        max_num_rows=2, max_model_len=9, max_num_tokens=8, device=torch.device("cuda")
    )
    token_ids, positions, _ = table.begin_step(np.array([1]), np.array([3]))
    assert token_ids.data_ptr() == table.token_ids.data_ptr()
    assert positions.data_ptr() == table.positions.data_ptr()


def make_start(row: int, token_ids: list[int], *, donor_row: int = -1) -> SequenceStart:
    return SequenceStart(
        row, pack_token_ids(token_ids), 3, [], SamplingParams(), 0, row, donor_row=donor_row
    )


def test_start_with_a_donor_has_its_prompt() -> None:
    prompts = Prompts()
    prompts.complete_starts([make_start(0, [1, 2, 3, 4])])
    (start,) = prompts.complete_starts([make_start(1, [], donor_row=0)])
    assert (start.row, start.token_ids, start.donor_row) == (1, pack_token_ids([1, 2, 3]), 0)
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


@pytest.mark.parametrize("num_prompt_tokens", [1, 4, 5, 8, 11])
def test_a_fork_has_the_tokens_and_leading_blocks_of_its_donor(num_prompt_tokens: int) -> None:
    device = torch.device("cpu")
    table = TokenTable(max_num_rows=3, max_model_len=40, max_num_tokens=64, device=device)
    batch = InputBatch(table, max_num_rows=3, max_model_len=40, block_size=4, replays_decodes=False)
    prompt, last = list(range(100, 100 + num_prompt_tokens)), num_prompt_tokens - 1
    prompts, blocks = Prompts(), [7, 3, 5][: last // 4 + 1]

    def run(step: int, starts: list[SequenceStart], chunk: SequencePlan) -> StepInputs:
        batch.apply_plan(StepPlan(step, [chunk], prompts.complete_starts(starts)))
        return batch.prepare_inputs(StepPlan(step, [chunk]))

    def start(row: int, block_ids: list[int], **fields: Any) -> SequenceStart:  # Any: its fields
        token_ids = b"" if fields else pack_token_ids(prompt)
        return SequenceStart(
            row, token_ids, num_prompt_tokens, block_ids, SamplingParams(), 0, row, **fields
        )

    run(0, [start(0, blocks)], SequencePlan(0, 0, num_prompt_tokens, True))
    # The donor's row is taken by a later start of the plan.
    starts = [start(1, [9], donor_row=0), start(2, [8], donor_row=1), start(0, [2] * len(blocks))]
    for row, block in ((1, 9), (2, 8)):
        inputs = run(row, starts if row == 1 else [], SequencePlan(row, last, 1, True))
        assert inputs.token_ids.tolist() == [prompt[last]]
        assert inputs.attention.block_tables.tolist() == [[*blocks[:-1], block]]
        assert inputs.attention.slot_mapping.tolist() == [4 * block + last % 4]
        assert table.tokens(row, 0, num_prompt_tokens).tolist() == prompt


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
        token_ids=range(num_tokens),
        positions=None,
        attention=None,
        logits_indices=None,
        segments=None,
        has_kept_states=False,
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


@dataclass
class Row:
    """What a sequence has, as the scheduler knows it."""

    token_ids: list[int]
    num_prompt_tokens: int
    entries: list[list[int]]
    """The block of each group, for every entry of the block table."""
    num_computed: int
    num_prompt_logprobs: int | None
    rng: random.Random = field(repr=False)

    def chunk(
        self, row: int, block_size: int, num_groups: int, block_ids: list[int]
    ) -> SequencePlan:
        """Compute some of the known tokens, in new blocks of the pool `block_ids`."""
        num_left = len(self.token_ids) - self.num_computed
        num_tokens = self.rng.randint(1, num_left)
        end = self.num_computed + num_tokens
        num_new = max(0, -(-end // block_size) - len(self.entries))
        added = [[block_ids.pop() for _ in range(num_groups)] for _ in range(num_new)]
        self.entries += added
        is_sampled = num_tokens == num_left
        return SequencePlan(row, self.num_computed, num_tokens, is_sampled, tuple(chain(*added)))


class Rows:
    """Sequences that start, some preempted before, compute chunks, sample and end."""

    def __init__(
        self, rng: random.Random, block_size: int, windows: tuple[int | None, ...]
    ) -> None:
        self.by_row: dict[int, Row] = {}
        self._rng = rng
        self._block_size = block_size
        self._windows = windows
        self._block_ids = list(range(6000))
        rng.shuffle(self._block_ids)

    def plan(self, step: int) -> StepPlan:
        rng = self._rng
        starts = [
            self._start(row)
            for row in range(NUM_ROWS_AT_RANDOM)
            if row not in self.by_row and rng.random() < 0.5
        ]
        chunks = [
            one.chunk(row, self._block_size, len(self._windows), self._block_ids)
            for row, one in self.by_row.items()
            if rng.random() < 0.8
        ]
        decodes = [
            one for one in chunks if one.num_tokens == 1 and one.is_sampled and rng.random() < 0.7
        ]
        others = [one for one in chunks if one not in decodes]
        others.sort(key=lambda one: one.num_tokens == 1)
        growing = [one for one in decodes if one.new_block_ids]
        packed = Decodes.pack(
            [one.row for one in decodes],
            [one.first_position for one in decodes],
            [one.row for one in growing],
            [block_id for one in growing for block_id in one.new_block_ids],
        )
        return StepPlan(step, others, starts, packed)

    def _start(self, row: int) -> SequenceStart:
        rng, block_size = self._rng, self._block_size
        num_prompt_tokens, num_generated = rng.randint(1, 12), rng.choice((0, 0, 1, 5))
        token_ids = [rng.randrange(999) for _ in range(num_prompt_tokens + num_generated)]
        number, index = rng.choice((None, 0, 2)), rng.choice((0, 0, 1))
        # A prompt that is described is computed, and at least one token always is.
        num_cached = 0 if number is not None else rng.randint(0, (len(token_ids) - 1) // block_size)
        num_computed = num_cached * block_size
        entries = [[self._block_ids.pop() for _ in self._windows] for _ in range(num_cached)]
        described = number if index == 0 else None
        self.by_row[row] = Row(token_ids, num_prompt_tokens, entries, num_computed, described, rng)
        sampling = SamplingParams(prompt_logprobs=number)
        # No key of a block is visible from the first token that is computed.
        block_ids = [
            -1
            if window is not None and (entry + 1) * block_size <= num_computed - window + 1
            else block_id
            for entry, blocks in enumerate(entries)
            for block_id, window in zip(blocks, self._windows, strict=True)
        ]
        return SequenceStart(
            row, pack_token_ids(token_ids), num_prompt_tokens, block_ids, sampling, 0, index
        )

    def note_step(self, plan: StepPlan, sampled: list[int]) -> None:
        """Take what a plan computed and sampled; some sequences end."""
        token_ids = iter(sampled)
        for one in plan.sequences:
            row = self.by_row[one.row]
            row.num_computed += one.num_tokens
            if one.is_sampled:
                row.token_ids.append(next(token_ids))
                if len(row.token_ids) == MAX_LEN or self._rng.random() < 0.1:
                    del self.by_row[one.row]


def check_tables(
    attention: AttentionBatch,
    positions: list[int],
    rows: list[Row],
    group: int,
    window: int | None,
    size: int,
) -> None:
    """Check that each query of a group finds the keys that it sees, and no sequence has more."""
    first = 0
    for number, row in enumerate(rows):
        length, seq_len = int(attention.query_lens[number]), int(attention.seq_lens[number])
        blocks = [entry[group] for entry in row.entries]
        num_omitted = positions[first] - (seq_len - length)
        assert num_omitted >= 0
        assert num_omitted % size == 0
        reach = MAX_LEN if window is None else window
        # The first query sees a key of the first block.
        assert positions[first] - reach + 1 < num_omitted + size or num_omitted == 0
        for at in range(first, first + length):
            position = positions[at]
            assert position - num_omitted == seq_len - (first + length - at)
            place = blocks[position // size] * size + position % size
            assert attention.slot_mapping[at] == place
            for key in range(max(0, position - reach + 1), position + 1):
                entry = (key - num_omitted) // size
                assert entry >= 0
                assert attention.block_tables[number, entry] == blocks[key // size]
        first += length


def check_inputs(
    inputs: StepInputs,
    plan: StepPlan,
    rows: dict[int, Row],
    windows: tuple[int | None, ...],
    block_size: int,
    *,
    replays: bool,
) -> None:
    """Check all inputs against the rows."""
    attention = inputs.attention
    ends = attention.query_lens.cumsum()
    token_of: dict[Place, int] = {}
    """The index of each token of the step."""
    row_of = {
        block_id: row for row, one in rows.items() for entry in one.entries for block_id in entry
    }
    positions = inputs.positions.tolist()
    found = [row_of[int(attention.slot_mapping[end - 1]) // block_size] for end in ends]
    for group, window in enumerate(windows):
        tables = attention.groups[group]
        assert tables.query_lens.tolist() == attention.query_lens.tolist()
        assert tables.num_prefills == attention.num_prefills
        check_tables(tables, positions, [rows[row] for row in found], group, window, block_size)
    for number, (end, length, row) in enumerate(
        zip(ends, attention.query_lens, found, strict=True)
    ):
        known = rows[row]
        assert (length > 1) == (number < attention.num_prefills)
        for at in range(end - length, end):
            position = positions[at]
            assert inputs.token_ids[at] == known.token_ids[position]
            # A generated token is alone, as it was at first.
            assert not replays or length == 1 or position < known.num_prompt_tokens
            token_of[row, position] = at
    computed = [(one.row, range(one.first_position, one.first_position + one.num_tokens))
                for one in plan.sequences]  # fmt: skip
    assert len(token_of) == ends[-1]
    assert set(token_of) == {(row, position) for row, part in computed for position in part}
    sampled = [(one.row, one.first_position + one.num_tokens)
               for one in plan.sequences if one.is_sampled]  # fmt: skip
    assert list(zip(inputs.sampled_rows, inputs.sampled_positions, strict=True)) == sampled
    needed = [token_of[row, position - 1] for row, position in sampled]
    described = {}
    for row, part in computed:
        one = rows[row]
        before = [position for position in part if position + 1 < one.num_prompt_tokens]
        if one.num_prompt_logprobs is not None and before:
            described[row] = (before, [one.token_ids[position + 1] for position in before])
    assert {one.row for one in inputs.prompt_chunks} == set(described)
    for chunk in inputs.prompt_chunks:
        before, token_ids = described[chunk.row]
        assert chunk.first_position == before[0] + 1
        assert chunk.token_ids.tolist() == token_ids
        assert chunk.num_likeliest == rows[chunk.row].num_prompt_logprobs
        needed += [token_of[chunk.row, position] for position in before]
    indices = inputs.logits_indices
    assert needed == (list(range(ends[-1])) if indices is None else indices.tolist())
    if (flags := inputs.sampled_sequences) is None:
        assert replays or indices is None or inputs.prompt_chunks
    else:
        assert (ends[flags] - 1).tolist() == needed
        decodes = attention.last_tokens(flags)
        assert decodes.num_decodes == len(needed)
        for ours, whole in zip(decodes.groups, attention.groups, strict=True):
            assert ours.seq_lens.tolist() == whole.seq_lens[flags].tolist()
            assert (ours.block_tables == whole.block_tables[flags]).all()
            assert (ours.slot_mapping == -1).all()


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 40), marks=pytest.mark.slow)])
@pytest.mark.parametrize("windows", [(None,), (5,), (None, 3, 8, 3)], ids=str)
@pytest.mark.parametrize("replays", [True, False])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_inputs_of_random_plans(
    block_size: int, replays: bool, windows: tuple[int | None, ...], seeds: range
) -> None:
    for seed in seeds:
        rng = random.Random(f"{block_size} {replays} {seed} {windows}")
        table = TokenTable(
            max_num_rows=NUM_ROWS_AT_RANDOM,
            max_model_len=MAX_LEN,
            max_num_tokens=NUM_ROWS_AT_RANDOM * MAX_LEN,
            device=torch.device("cpu"),
        )
        batch = InputBatch(
            table,
            max_num_rows=NUM_ROWS_AT_RANDOM,
            max_model_len=MAX_LEN,
            block_size=block_size,
            replays_decodes=replays,
            windows=windows,
        )
        rows = Rows(rng, block_size, windows)
        for step in range(25):
            plan = rows.plan(step)
            batch.apply_plan(plan)
            if not plan.num_tokens:
                continue
            inputs = batch.prepare_inputs(plan)
            check_inputs(inputs, plan, rows.by_row, windows, block_size, replays=replays)
            sampled = [rng.randrange(999) for _ in inputs.sampled_rows]
            batch.append_sampled(inputs, torch.tensor(sampled, dtype=torch.int64))
            rows.note_step(plan, sampled)
