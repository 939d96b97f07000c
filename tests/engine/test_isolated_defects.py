"""A defect that concerns one request ends that request, whatever stage it is in, and no other."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import pytest

from cluster.engine.engine_loop import EngineLoop
from cluster.engine.engine_options import EngineOptions, engine_config
from cluster.engine.local_executor import LocalExecutor
from cluster.scheduling.device_tier import DeviceTier
from cluster.scheduling.kv_manager import KvManager
from cluster.scheduling.planner import Planner
from cluster.scheduling.prefix_cache import PrefixCache
from cluster.scheduling.sequence import Sequence
from pagedray.batch import SequenceStart
from pagedray.request import FinishReason, Request
from pagedray.sampling_params import SamplingParams
from tests.fakes import RecordingSink, wait_for
from tests.system.server_process import TINY_LLAMA
from workers.runner.input_batch import InputBatch
from workers.runner.kv_cache import KVCache
from workers.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MARKED_TOKEN = 999
"""In the prompt of the request that meets a defect."""
NUM_REQUESTS = 16
MARKED = "r5"


class Rig:
    """A local engine whose cache is too small for all requests."""

    def __init__(self) -> None:
        options = EngineOptions(
            executor="local",
            device="cpu",
            dtype="float32",
            num_threads=1,
            num_blocks=40,
            num_cpu_blocks=40,
            block_size=4,
            preemption="swap",
        )
        config = engine_config(TINY_LLAMA, options)
        self._num_runs = 0
        self.sink = RecordingSink()
        self.engine = EngineLoop(
            config, LocalExecutor(config, lambda what, fraction: None), self.sink
        )
        self.engine.start_steps()

    def run(self) -> tuple[dict[str, object], dict[str, list[int]]]:
        """Serve the requests; return how each ended, and its tokens."""
        self.sink.tokens.clear()
        self.sink.ends.clear()
        self._num_runs += 1
        for index in range(NUM_REQUESTS):
            self.sink.expect(f"r{index}")
            # Equal requests are rejected after the first that ends with an error.
            middle = [MARKED_TOKEN] * 5 + [self._num_runs] if f"r{index}" == MARKED else [7] * 6
            self.engine.submit_request(
                Request(
                    id=f"r{index}",
                    prompt_token_ids=(3, index, *middle, 11, index),
                    sampling=SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
                    seed=index,
                )
            )
        wait_for(lambda: not self.sink.num_open, timeout_s=60.0)
        ends: dict[str, object] = {name: ends[0] for (name, _), ends in self.sink.ends.items()}
        return ends, {name: list(ids) for (name, _), ids in self.sink.tokens.items()}


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.engine.close()


@pytest.fixture(scope="module")
def clean(rig: Rig) -> dict[str, list[int]]:
    """The tokens without a defect."""
    ends, tokens = rig.run()
    assert set(ends.values()) == {FinishReason.LENGTH}
    return tokens


def is_marked(argument: object) -> bool:
    """Whether a method was called for the marked request."""
    match argument:
        case Sequence():
            return MARKED_TOKEN in argument.token_ids
        case SequenceStart():
            return MARKED_TOKEN in array("i", argument.token_ids)
        case list() | array():
            return MARKED_TOKEN in argument
        case _:
            return False


STAGES: dict[str, tuple[type, str]] = {
    "hash": (DeviceTier, "find_prefix"),
    "hash a full block": (DeviceTier, "key_after"),
    "admit": (KvManager, "admit"),
    "allocate for a chunk": (Planner, "_plan_chunk"),
    "allocate for a token": (KvManager, "append"),
    "register": (PrefixCache, "register_blocks"),
    "start of a row": (InputBatch, "_start"),
    "sampling parameters": (Sampler, "start"),
}


def defective(method: Callable[..., Any], *, is_after: bool) -> Callable[..., Any]:
    """Return a method that fails for the marked request, before or after its work."""

    # Any: the methods of all stages.
    def call(self: object, *arguments: Any, **more: Any) -> Any:
        has_defect = any(map(is_marked, arguments))
        if has_defect and not is_after:
            raise RuntimeError("a planned defect")
        result = method(self, *arguments, **more)
        if has_defect:
            raise RuntimeError("a planned defect")
        return result

    return call


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("stage", STAGES)
def test_others_get_their_tokens(
    rig: Rig,
    clean: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    is_after: bool,
) -> None:
    owner, name = STAGES[stage]
    monkeypatch.setattr(owner, name, defective(getattr(owner, name), is_after=is_after))
    ends, tokens = rig.run()
    check(rig, ends, tokens, clean)


def test_others_get_their_tokens_if_a_swap_fails(
    rig: Rig, clean: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    swap_out = KvManager.swap_out
    swapped: list[str] = []

    def fail_once(self: KvManager, sequence: Sequence, step: int) -> list[object]:
        copies = swap_out(self, sequence, step)
        if not swapped:
            swapped.append(sequence.request_id)
            raise RuntimeError("a planned defect")
        return list(copies)

    monkeypatch.setattr(KvManager, "swap_out", fail_once)
    ends, tokens = rig.run()
    assert swapped, "the cache is large enough for all"
    check(rig, ends, tokens, clean, at_fault=swapped[0])


def test_others_get_their_tokens_if_a_copy_on_the_rank_fails(
    rig: Rig, clean: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[bool] = []
    swap_in = KVCache.swap_in

    # Any: the copies of blocks.
    def fail_once(self: KVCache, copies: Any) -> None:
        if copies and not failed:
            failed.append(True)
            raise MemoryError
        swap_in(self, copies)

    monkeypatch.setattr(KVCache, "swap_in", fail_once)
    ends, tokens = rig.run()
    assert failed
    # It fails only once, so that no request is the cause.
    assert set(ends.values()) == {FinishReason.LENGTH}
    assert others(tokens) == others(clean)


def others(tokens: dict[str, list[int]], at_fault: str = MARKED) -> dict[str, list[int]]:
    """Return the tokens of requests whose prompts are the same in each run, and that end well."""
    return {name: ids for name, ids in tokens.items() if name not in (MARKED, at_fault)}


def check(
    rig: Rig,
    ends: dict[str, object],
    tokens: dict[str, list[int]],
    clean: dict[str, list[int]],
    at_fault: str = MARKED,
) -> None:
    """Check that one request ended with an error, and that nothing of it is left."""
    assert {name for name, end in ends.items() if end is FinishReason.ERROR} == {at_fault}
    assert others(tokens, at_fault) == others(clean, at_fault)
    wait_for(lambda: rig.engine.is_healthy)
    stats = rig.engine.stats().scheduler
    wait_for(lambda: rig.engine.stats().scheduler.num_free_blocks == stats.num_blocks)
    assert stats.num_running == stats.num_waiting == stats.num_swapped == 0
