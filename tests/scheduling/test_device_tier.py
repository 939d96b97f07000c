from __future__ import annotations

from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cluster.scheduling.device_tier import BlockKey, DeviceTier, PromptKeys
from cluster.scheduling.scheduler import Scheduler
from pagedray.batch import StepOutput
from pagedray.errors import InvalidRequestError
from pagedray.request import Request
from tests.scheduling.builders import make_request, make_scheduler, plan_of

KEY = b"k" * 32
BLOCK_SIZE = 2
ROOT = b"root"

NUM_TOKENS = 6000


def make_cache(hash_key: bytes = KEY) -> DeviceTier:
    """Return a tier with all blocks owned."""
    cache = DeviceTier(hash_key, num_blocks=16, is_enabled=True, save=lambda key, block: None)
    cache.pool.allocate_all(16)
    return cache


def tokens(*token_ids: int) -> array[int]:
    return array("I", token_ids)


def test_block_is_found_by_equal_tokens_after_equal_tokens() -> None:
    cache = make_cache()
    first = cache.key_after(cache.root("a"), tokens(1, 2))
    second = cache.key_after(first.digest, tokens(3, 4))
    assert cache.add_block(first, 10)
    assert cache.add_block(second, 11)
    again = cache.key_after(cache.root("a"), tokens(1, 2))
    assert cache.find_block(again) == 10
    assert cache.find_block(cache.key_after(again.digest, tokens(3, 4))) == 11


def test_equal_tokens_are_other_blocks_after_other_tokens_tenants_or_salts() -> None:
    cache = make_cache()
    roots = [cache.root("a"), cache.root("b"), cache.root("a", "one"), cache.root("a", "two")]
    parents = [*roots, cache.key_after(cache.root("a"), tokens(0, 2)).digest]
    keys = [cache.key_after(parent, tokens(3, 4)) for parent in parents]
    for block, key in enumerate(keys):
        assert cache.find_block(key) is None
        cache.add_block(key, block)
    assert [cache.find_block(key) for key in keys] == list(range(5))


def test_salt_that_spells_tokens_is_not_a_block_of_them() -> None:
    cache = make_cache()
    first_tokens = tokens(65, 66)
    salt = first_tokens.tobytes().decode()
    first = cache.key_after(cache.root("a"), first_tokens)
    cache.add_block(cache.key_after(first.digest, tokens(3, 4)), 10)
    assert cache.find_block(cache.key_after(cache.root("a", salt), tokens(3, 4))) is None


def test_digests_depend_on_the_process_key() -> None:
    digests = {
        cache.key_after(cache.root("a"), tokens(1, 2)).digest
        for cache in (make_cache(), make_cache(b"other"))
    }
    assert len(digests) == 2


def test_equal_digest_of_other_tokens_is_no_hit() -> None:
    cache = make_cache()
    key = cache.key_after(cache.root("a"), tokens(1, 2))
    cache.add_block(key, 10)
    assert cache.find_block(BlockKey(key.digest, b"other tokens")) is None


def test_first_of_two_equal_blocks_is_known() -> None:
    cache = make_cache()
    key = cache.key_after(cache.root("a"), tokens(1, 2))
    assert cache.add_block(key, 10)
    assert not cache.add_block(key, 11)
    assert cache.find_block(key) == 10
    assert len(cache) == 1


def test_block_that_is_computed_again_is_evicted_last() -> None:
    cache = make_cache()
    keys = [cache.key_after(ROOT, tokens(number, 0)) for number in range(3)]
    for block, key in enumerate(keys):
        cache.add_block(key, block)
        cache.pool.release(block)
    assert not cache.add_block(keys[0], 5)
    assert list(cache.pool.idle_blocks) == [1, 2, 0]


def test_forgotten_block_is_not_found() -> None:
    cache = make_cache()
    key = cache.key_after(cache.root("a"), tokens(1, 2))
    cache.add_block(key, 10)
    cache.forget_block(10)
    cache.forget_block(10)
    assert cache.find_block(key) is None
    assert len(cache) == 0


def test_tenant_with_a_lone_surrogate_has_a_root() -> None:
    assert len(make_cache().root("\ud800")) == 32


def test_blocks_are_not_verified_after_all_contents_were_lost() -> None:
    cache = make_cache()
    key = cache.key_after(cache.root("a"), tokens(1, 2))
    cache.add_block(key, 10)
    cache.mark_verified([10])
    assert cache.is_verified(10)
    cache.clear()
    cache.pool.allocate_all(16)
    assert cache.add_block(key, 10)
    assert not cache.is_verified(10)


def found_one_by_one(
    cache: DeviceTier, token_ids: array[int], num_blocks: int
) -> tuple[list[BlockKey], list[int]]:
    """Return the keys that are looked up, and the blocks that are found."""
    keys: list[BlockKey] = []
    hits: list[int] = []
    parent = ROOT
    for first in range(0, num_blocks * BLOCK_SIZE, BLOCK_SIZE):
        keys.append(cache.key_after(parent, token_ids[first : first + BLOCK_SIZE]))
        block = cache.find_block(keys[-1])
        if block is None:
            break
        parent = keys[-1].digest
        hits.append(block)
    return keys, hits


@given(
    st.lists(st.integers(0, 1), min_size=2, max_size=13),
    st.lists(st.integers(0, 1), max_size=13),
    st.integers(0, 6),
    st.none() | st.integers(0, 5),
    st.none() | st.integers(0, 5),
)
def test_prefix_is_what_single_look_ups_find(
    cached: list[int], wanted: list[int], num_known: int, renewed: int | None, forged: int | None
) -> None:
    cache = make_cache()
    parent = ROOT
    for block in range(len(cached) // BLOCK_SIZE):
        tokens = array("I", cached[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE])
        key = cache.key_after(parent, tokens)
        if block == renewed:
            cache.invalidate_key(parent, key)
            key = cache.key_after(parent, tokens)
        # Other tokens with the same digest.
        content = b"other" if block == forged else key.token_bytes
        assert cache.add_block(BlockKey(key.digest, content), block)
        parent = key.digest
    token_ids = array("I", wanted)
    num_blocks = len(token_ids) // BLOCK_SIZE
    keys, hits = found_one_by_one(cache, token_ids, num_blocks)
    known = keys[:num_known]
    assert hits == cache.find_prefix(
        known, ROOT, token_ids, num_blocks=num_blocks, block_size=BLOCK_SIZE
    )
    assert known == keys


def scheduler_and_requests(*names: str) -> tuple[Scheduler, list[Request]]:
    scheduler = make_scheduler(
        block_size=16, num_blocks=1000, max_num_batched_tokens=8192, max_model_len=8192
    )
    return scheduler, [long_request(name) for name in names]


def long_request(name: str, *, token_id: int = 1) -> Request:
    prompt = (token_id,) * NUM_TOKENS
    return make_request(name, prompt, max_tokens=1, tenant="one", cache_salt="salt")


def run(scheduler: Scheduler) -> int:
    """Run one step and return its number of tokens."""
    plan = plan_of(scheduler)
    scheduler.update(StepOutput(plan.step, [7]))
    scheduler.acknowledge(plan.step)
    return plan.num_tokens


def test_steps_hash_nothing_of_a_prompt_that_was_hashed_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, requests = scheduler_and_requests("first", "second")
    prompts = [scheduler.prepare_prompt(request) for request in requests]

    # Nothing else can hash: there is no other hash with the key.
    monkeypatch.delattr(DeviceTier, "_keyed_hash")
    scheduler.add_request(requests[0], prompts[0])
    assert run(scheduler) == NUM_TOKENS
    scheduler.add_request(requests[1], prompts[1])
    # All full blocks but the one with the last token are found.
    assert run(scheduler) == 16


def test_keys_are_those_that_steps_compute() -> None:
    scheduler, (first, request) = scheduler_and_requests("first", "second")
    scheduler.add_request(first)
    run(scheduler)
    scheduler.add_request(request, scheduler.prepare_prompt(request))
    assert run(scheduler) == 16


def test_keys_that_were_renewed_meanwhile_are_not_used() -> None:
    scheduler, (first, second, again) = scheduler_and_requests("first", "second", "again")
    prompt = scheduler.prepare_prompt(second)
    scheduler.add_request(first)
    plan = plan_of(scheduler)
    # Its logits are not finite, so that no later request may find its blocks.
    scheduler.update(StepOutput(plan.step, [-1]))
    scheduler.acknowledge(plan.step)
    scheduler.add_request(second, prompt)
    assert run(scheduler) == NUM_TOKENS
    scheduler.add_request(again)
    assert run(scheduler) == 16


class InterruptedCache(DeviceTier):
    """Hashes a prompt whenever another one is hashed, as another thread may."""

    __slots__ = ("found",)

    found: list[PromptKeys] | None

    def hash_again(self) -> PromptKeys:
        return self.hash_prompt(array("I", (1, 2, 3, 4)), block_size=2, tenant="one", salt="")

    def _digest(self, content: bytes) -> bytes:
        found, self.found = self.found, None
        if found is not None:
            found.append(self.hash_again())
            self.found = found
        return super()._digest(content)


def test_keys_hashed_while_others_are_renewed_are_of_the_revision_before() -> None:
    cache = InterruptedCache(b"key", num_blocks=4, is_enabled=True, save=lambda key, block: None)
    cache.found = None
    (old, _), revision = cache.hash_again()
    found: list[PromptKeys] = []
    cache.found = found
    cache.invalidate_key(cache.root("one"), old)
    cache.found = None
    assert cache.hash_again().keys[0] != old
    assert [one.revision for one in found if one.keys[0] == old] == [revision] * len(found)


@pytest.mark.parametrize("token_id", [2**31, -1])
def test_prompt_with_an_invalid_token_is_rejected(token_id: int) -> None:
    with pytest.raises(InvalidRequestError, match="Token ids must be from 0 to 2147483647"):
        make_scheduler(max_model_len=8192).prepare_prompt(long_request("bad", token_id=token_id))
