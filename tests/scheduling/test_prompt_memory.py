"""Siblings share the tokens of their prompt until they start."""

import tracemalloc

from tests.scheduling.harness import Harness

N = 64
NUM_TOKENS = 20_000


def test_siblings_that_wait_share_one_prompt() -> None:
    harness = Harness(num_blocks=6000, max_model_len=NUM_TOKENS + 10, enable_prefix_cache=False)
    prompt = [5] * NUM_TOKENS
    tracemalloc.start()
    harness.add(prompt, n=N, max_tokens=2)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    # The client's tuple has 8 bytes for each token, and the shared copy 4.
    assert size < 16 * NUM_TOKENS
    assert len({id(sequence.token_ids) for sequence in harness.sequences}) == 1


def test_what_siblings_generate_is_their_own() -> None:
    harness = Harness()
    request = harness.add([1] * 6, n=3)
    harness.drain()
    kept = [sequence.token_ids for sequence in harness.sequences]
    assert [list(one[6:]) for one in kept] == [harness.results.tokens[request, i] for i in range(3)]
    assert harness.sequences[0].active.prompt.tolist() == [1] * 6
