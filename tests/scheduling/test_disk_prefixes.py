"""Prefixes that come back from the disk, seen from plans."""

from cluster.scheduling.sequence import DiskRead, Running, Waiting
from pagedray.config import Preemption
from tests.scheduling.fake_worker import known_tokens
from tests.scheduling.harness import Harness


def on_disk(
    *, max_num_seqs: int = 8, preemption: Preemption = "swap", token_s: float = 0.0
) -> Harness:
    """Return a harness whose disk alone has the first prompt, of two full blocks."""
    harness = Harness(
        block_size=4,
        num_blocks=6,
        num_cpu_blocks=8,
        num_disk_blocks=20,
        max_num_seqs=max_num_seqs,
        preemption=preemption,
        block_copy_s=token_s,
        token_s=token_s,
    )
    for token_id in (1, 2, 4, 5, 6, 8, 10, 12):
        harness.add([token_id] * 9, max_tokens=1)
        harness.drain()
        # What the last step did not write, the next one does.
        harness.add([7], max_tokens=2)
        harness.drain()
    kv = harness.scheduler._kv
    assert kv.disk is not None
    assert kv.cpu is not None
    first = harness.sequences[0].blocks.keys
    assert [kv.disk.find_block(key) is not None for key in first] == [True, True]
    assert [kv.cpu.find_block(key) for key in first] == [None, None]
    assert [kv.device.find_block(key) for key in first] == [None, None]
    return harness


def test_a_sequence_waits_without_a_row_until_its_blocks_are_read_and_then_copied() -> None:
    harness = on_disk()
    harness.add([1] * 8 + [5], max_tokens=1)
    sequence = harness.sequences[-1]
    plan = harness.schedule()
    assert plan is not None
    assert (len(plan.disk_reads), plan.starts, plan.sequences) == (2, [], [])
    assert isinstance(sequence.state, Waiting)
    harness.execute()
    harness.collect()
    harness.acknowledge()
    # An acknowledgement says nothing of files.
    assert harness.schedule() is None
    harness.end_disk_jobs()
    plan = harness.schedule()
    assert plan is not None
    assert [copy.target for copy in plan.swap_ins] == plan.starts[0].block_ids
    harness.drain()
    assert harness.results.events[-1].num_cached_tokens == 8
    stats = harness.scheduler.stats()
    assert (stats.num_read_blocks, stats.num_disk_hit_tokens) == (2, 8)


def test_a_sequence_reads_no_blocks_that_are_computed_sooner() -> None:
    # Copying a block takes as long as computing a token; reading one takes longer.
    harness = on_disk(preemption="auto", token_s=1e-3)
    harness.add([1] * 8 + [5], max_tokens=1)
    plan = harness.schedule()
    assert plan is not None
    assert len(plan.disk_reads) == 2
    harness.settle()
    harness.drain()
    harness.add([2] * 8 + [5], max_tokens=1)
    plan = harness.schedule()
    assert plan is not None
    assert plan.disk_reads == []
    assert plan.sequences[0].num_tokens == 9
    harness.drain()


def test_a_sequence_whose_blocks_cannot_be_read_computes_them() -> None:
    harness = on_disk()
    harness.add([1] * 8 + [5], max_tokens=1)
    harness.schedule()
    harness.end_disk_jobs(num_failed=2)
    harness.drain()
    assert harness.results.events[-1].num_cached_tokens == 0
    assert harness.scheduler.stats().num_failed_reads == 2


def test_others_start_while_a_sequence_waits_for_the_disk() -> None:
    harness = on_disk(max_num_seqs=1)
    harness.add([1] * 8 + [5], max_tokens=1)
    harness.add([7], max_tokens=1)
    plan = harness.schedule()
    assert plan is not None
    assert len(plan.disk_reads) == 2
    assert [known_tokens(start) for start in plan.starts] == [[7]]
    harness.drain()


def test_a_second_sequence_waits_for_the_same_blocks_and_reads_none() -> None:
    harness = on_disk()
    for _ in range(2):
        harness.add([1] * 8 + [5], max_tokens=1)
    plan = harness.schedule()
    assert plan is not None
    assert (len(plan.disk_reads), plan.starts) == (2, [])
    for sequence in harness.sequences[-2:]:
        assert isinstance(sequence.state, Waiting)
        assert sequence.state.disk_read == DiskRead(plan.step)
    harness.drain()
    assert {event.num_cached_tokens for event in harness.results.events[-2:]} == {8}


def test_another_tenant_waits_for_no_block_of_the_first() -> None:
    harness = on_disk()
    harness.add([1] * 8 + [5], max_tokens=1, tenant="other")
    plan = harness.schedule()
    assert plan is not None
    assert (plan.disk_reads, plan.sequences[0].num_tokens) == ([], 9)
    harness.drain()


def test_new_ranks_have_no_prefixes_in_their_files() -> None:
    harness = on_disk()
    harness.add([1] * 8 + [5], max_tokens=1)
    harness.schedule()
    harness.replace_worker()
    plan = harness.schedule()
    assert plan is not None
    assert (plan.disk_reads, plan.sequences[0].num_tokens) == ([], 9)
    harness.drain()


def test_no_row_is_taken_for_a_sequence_that_waits_for_the_disk() -> None:
    harness = on_disk(max_num_seqs=1)
    harness.add([7] * 3, max_tokens=12, priority=1)
    harness.step()
    urgent = harness.add([1] * 8 + [5], max_tokens=1, priority=0)
    plan = harness.schedule()
    assert plan is not None
    assert len(plan.disk_reads) == 2
    running, waiting = harness.sequences[-2:]
    assert (type(running.state), type(waiting.state)) == (Running, Waiting)
    harness.settle()
    while not harness.results.tokens[urgent, 0]:
        harness.step()
    assert running.num_preemptions == 1
    assert harness.results.events[-1].num_cached_tokens == 8
    harness.drain()
