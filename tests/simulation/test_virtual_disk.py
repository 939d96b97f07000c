"""A disk in `pagedray simulate`; the expected times are worked out by hand."""

from math import inf

from cluster.scheduling.kv_manager import KvOptions
from cluster.simulation.step_cost import StepCost
from cluster.simulation.virtual_disk import VirtualDisk
from cluster.simulation.virtual_replica import VirtualReplica, distinct_prompt
from pagedray.batch import BlockCopy, DiskReport, StepPlan
from pagedray.config import SchedulerConfig

STEP_S = 1.0


def copies(number: int) -> list[BlockCopy]:
    return [BlockCopy(block, block) for block in range(number)]


def test_reads_and_writes_run_beside_each_other_and_each_in_order() -> None:
    disk = VirtualDisk(read_s=2.0, write_s=3.0)
    assert disk.next_report_s == inf
    disk.launch(StepPlan(0, [], disk_reads=copies(2), disk_writes=copies(1)), now_s=10.0)
    disk.launch(StepPlan(1, [], disk_reads=copies(3)), now_s=11.0)
    assert disk.next_report_s == 13.0
    assert disk.take_reports(12.9) == []
    first = [DiskReport(0, True, [], 4.0), DiskReport(0, False, [], 3.0)]
    assert disk.take_reports(14.0) == first
    # It waits for the two blocks before.
    assert disk.next_report_s == 20.0
    assert disk.take_reports(20.0) == [DiskReport(1, True, [], 6.0)]
    # The disk was idle in between.
    disk.launch(StepPlan(2, [], disk_reads=copies(1)), now_s=30.0)
    assert disk.next_report_s == 32.0


def make_replica(*, num_disk_blocks: int, read_s: float) -> VirtualReplica:
    """Return a replica whose CPU pool has room for five prompts of four blocks."""
    return VirtualReplica(
        SchedulerConfig(max_num_seqs=1, preemption="swap"),
        KvOptions(block_size=16, num_blocks=6, num_cpu_blocks=20, num_disk_blocks=num_disk_blocks),
        StepCost(points=((0, STEP_S), (1, STEP_S)), block_out_s=1e-3, block_in_s=1e-3),
        max_model_len=90,
        disk=VirtualDisk(read_s=read_s, write_s=1e-3),
    )


def first_token_of_the_first_prompt_again(replica: VirtualReplica) -> float:
    """Return the time to the first token of a prompt that seven others have evicted."""
    for number in (*range(8), 0):
        call = replica.submit(distinct_prompt(number, 65), num_output_tokens=4)
        replica.run()
        # Requests that arrive later give the disk time for its writes.
        replica.now_s += 100.0
        replica.submit([3], num_output_tokens=9, arrival_s=replica.now_s)
        replica.run()
    return call.ttft_s


def test_what_the_cpu_pool_lacks_is_read_before_its_prompt_starts() -> None:
    without = make_replica(num_disk_blocks=0, read_s=0.5)
    first_token_of_the_first_prompt_again(without)
    assert without.scheduler.stats().num_read_blocks == 0
    replica = make_replica(num_disk_blocks=200, read_s=0.5)
    first_token_of_the_first_prompt_again(replica)
    stats = replica.scheduler.stats()
    assert stats.num_written_blocks >= 8
    assert stats.num_read_blocks > 1
    assert stats.num_disk_hit_tokens == stats.num_read_blocks * 16


def test_a_slower_disk_delays_the_first_token_by_its_blocks() -> None:
    times, reads = [], []
    for read_s in (0.5, 1.5):
        replica = make_replica(num_disk_blocks=200, read_s=read_s)
        times.append(first_token_of_the_first_prompt_again(replica))
        reads.append(replica.scheduler.stats().num_read_blocks)
    assert reads[0] == reads[1] > 0
    assert times[1] - times[0] == reads[0] * 1.0
