"""The tokens of rows, against lists of them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from pagedray.batch import pack_token_ids
from tests.workers.devices import DEVICES
from workers.runner.token_table import TokenTable

NUM_ROWS, MAX_MODEL_LEN = 7, 30


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
