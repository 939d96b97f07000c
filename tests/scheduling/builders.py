"""Schedulers, requests, and a KV manager with few blocks and sequences for it."""

from array import array
from typing import Any

from cluster.scheduling.kv_manager import Admitted, KvManager, KvOptions
from cluster.scheduling.scheduler import Scheduler
from cluster.scheduling.sequence import ActiveRequest, Sequence
from cluster.scheduling.speculation import Speculator
from pagedray.batch import BlockCopy, StepPlan
from pagedray.config import SchedulerConfig, StepLimits
from pagedray.request import Request
from pagedray.sampling_params import SamplingParams

BLOCK_SIZE = 4


def make_manager(
    *,
    num_blocks: int = 8,
    num_cpu_blocks: int = 8,
    enable_prefix_cache: bool = True,
    has_cpu_cache: bool = False,
) -> KvManager:
    options = KvOptions(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        num_cpu_blocks=num_cpu_blocks,
        enable_prefix_cache=enable_prefix_cache,
        enable_cpu_prefix_cache=has_cpu_cache,
        hash_key=b"key",
    )
    return KvManager(options, costs=None, limits=StepLimits(max_num_batched_tokens=100))


def make_scheduler(
    *,
    block_size: int = 4,
    num_blocks: int = 64,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 128,
    enable_prefix_cache: bool = True,
    speculator: Speculator | None = None,
) -> Scheduler:
    """Return a scheduler without a CPU pool."""
    return Scheduler(
        config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens),
        kv=KvOptions(
            block_size=block_size,
            num_blocks=num_blocks,
            num_cpu_blocks=0,
            enable_prefix_cache=enable_prefix_cache,
            hash_key=b"key",
        ),
        max_model_len=max_model_len,
        speculator=speculator,
    )


def plan_of(scheduler: Scheduler) -> StepPlan:
    """Return the next plan, which there must be."""
    plan = scheduler.schedule()
    assert plan is not None
    return plan


# Any: fields of several types.
def make_request(name: str = "r", prompt: tuple[int, ...] = (1,), **fields: Any) -> Request:
    """Return a request; fields that `SamplingParams` has are for the sampling."""
    names = SamplingParams.__struct_fields__
    sampling = SamplingParams(**{one: fields.pop(one) for one in names if one in fields})
    return Request(id=name, prompt_token_ids=prompt, sampling=sampling, seed=0, **fields)


def make_active(request: Request, *, arrival: int = 0) -> ActiveRequest:
    prompt = array("I", request.prompt_token_ids)
    return ActiveRequest(request, prompt=prompt, arrival=arrival, max_model_len=100)


def make_sequences(num_tokens: int, *, n: int = 1, tenant: str = "") -> list[Sequence]:
    return make_active(make_request("r", tuple(range(num_tokens)), n=n, tenant=tenant)).sequences


def admit(
    kv: KvManager, sequence: Sequence, *, num_tokens: int, num_spare: int = 0
) -> Admitted | None:
    """Return the admission of a sequence, or None without room."""
    admission = kv.admit(sequence, 0, num_tokens=num_tokens, num_spare=num_spare)
    return admission if isinstance(admission, Admitted) else None


def swap_out(kv: KvManager, sequence: Sequence, *, step: int) -> list[BlockCopy]:
    """Swap a sequence out, and return the copies."""
    sequence.state, copies = kv.swap_out(sequence, step)
    return copies


def swap_in(kv: KvManager, sequence: Sequence, *, num_tokens: int) -> list[BlockCopy]:
    """Swap a sequence in by step 1, and return the copies."""
    copies = kv.swap_in(sequence, 1, num_tokens=num_tokens, num_spare=0)
    assert isinstance(copies, list)
    return copies


def run_prompt(kv: KvManager, sequence: Sequence) -> None:
    """Admit a sequence and take its prompt as computed."""
    num_tokens = len(sequence.token_ids)
    assert admit(kv, sequence, num_tokens=num_tokens)
    sequence.blocks.extend(num_tokens, kv.block_size)
    sequence.num_computed = num_tokens
    kv.prefixes.register_blocks(sequence)
