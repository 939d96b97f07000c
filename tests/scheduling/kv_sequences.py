"""A KV manager with few blocks, and sequences with the same tokens for it."""

from array import array

from cluster.scheduling.kv_manager import KvManager, KvOptions
from cluster.scheduling.sequence import ActiveRequest, Sequence
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
    return KvManager(options, costs=None, max_num_tokens=100)


def make_sequences(num_tokens: int, *, n: int = 1, tenant: str = "") -> list[Sequence]:
    request = Request(
        id="r",
        prompt_token_ids=tuple(range(num_tokens)),
        sampling=SamplingParams(n=n),
        seed=0,
        tenant=tenant,
    )
    return ActiveRequest(
        request, prompt=array("I", request.prompt_token_ids), arrival=0, max_model_len=100
    ).sequences


def run_prompt(kv: KvManager, sequence: Sequence) -> None:
    """Admit a sequence and take its prompt as computed."""
    num_tokens = len(sequence.token_ids)
    assert kv.admit(sequence, num_tokens=num_tokens, num_spare=0)
    kv.extend(sequence, num_tokens)
    sequence.num_computed = num_tokens
    kv.register_blocks(sequence)
