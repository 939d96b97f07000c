"""Keys of a long prompt that are computed before it is queued."""

from array import array

import pytest

from cluster.scheduling.kv_manager import KvOptions
from cluster.scheduling.prefix_cache import PrefixCache, PromptKeys
from cluster.scheduling.scheduler import Scheduler
from pagedray.batch import StepOutput
from pagedray.config import SchedulerConfig
from pagedray.errors import InvalidRequestError
from pagedray.request import Request
from pagedray.sampling_params import SamplingParams

NUM_TOKENS = 6000


def make_scheduler() -> Scheduler:
    return Scheduler(
        config=SchedulerConfig(max_num_batched_tokens=8192),
        kv=KvOptions(
            block_size=16,
            num_blocks=1000,
            num_cpu_blocks=0,
            enable_cpu_prefix_cache=False,
            hash_key=b"key",
        ),
        max_model_len=8192,
    )


def make_request(name: str, *, token_id: int = 1) -> Request:
    return Request(
        id=name,
        prompt_token_ids=(token_id,) * NUM_TOKENS,
        sampling=SamplingParams(max_tokens=1),
        seed=0,
        tenant="one",
        cache_salt="salt",
    )


def run(scheduler: Scheduler) -> int:
    """Run one step and return its number of tokens."""
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(StepOutput(plan.step, [7]))
    scheduler.acknowledge(plan.step)
    return plan.num_tokens


def test_steps_hash_nothing_of_a_prompt_that_was_hashed_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = make_scheduler()
    requests = [make_request("first"), make_request("second")]
    prompts = [scheduler.prepare_prompt(request) for request in requests]

    # Nothing else can hash: there is no other hash with the key.
    monkeypatch.delattr(PrefixCache, "_keyed_hash")
    scheduler.add_request(requests[0], prompts[0])
    assert run(scheduler) == NUM_TOKENS
    scheduler.add_request(requests[1], prompts[1])
    # All full blocks but the one with the last token are found.
    assert run(scheduler) == 16


def test_keys_are_those_that_steps_compute() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("first"))
    run(scheduler)
    request = make_request("second")
    scheduler.add_request(request, scheduler.prepare_prompt(request))
    assert run(scheduler) == 16


def test_keys_that_were_renewed_meanwhile_are_not_used() -> None:
    scheduler = make_scheduler()
    first, second = make_request("first"), make_request("second")
    prompt = scheduler.prepare_prompt(second)
    scheduler.add_request(first)
    plan = scheduler.schedule()
    assert plan is not None
    # Its logits are not finite, so that no later request may find its blocks.
    scheduler.update(StepOutput(plan.step, [-1]))
    scheduler.acknowledge(plan.step)
    scheduler.add_request(second, prompt)
    assert run(scheduler) == NUM_TOKENS
    again = make_request("again")
    scheduler.add_request(again)
    assert run(scheduler) == 16


class InterruptedCache(PrefixCache):
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
    cache = InterruptedCache(b"key", num_blocks=4, is_enabled=True)
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
        make_scheduler().prepare_prompt(make_request("bad", token_id=token_id))
