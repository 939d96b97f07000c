"""A KV manager with few blocks, and sequences with the same tokens for it."""

from array import array

from cluster.scheduling.kv_manager import Admitted, KvManager, KvOptions
from cluster.scheduling.sequence import ActiveRequest, Sequence
from pagedray.batch import BlockCopy
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
    kv.register_blocks(sequence)
