"""Defects that the simulation must find, each a change of one method.

They are of the kinds that bookkeeping has: a missing line, a bound that is off by one.
"""

from __future__ import annotations

import inspect
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.engine.crash_search import CrashHandler, CrashSearch
from cluster.engine.engine_loop import EngineLoop
from cluster.engine.rank_channels import DiskReports
from cluster.engine.rank_places import PoolMemories
from cluster.scheduling.device_tier import DeviceTier
from cluster.scheduling.kv_manager import KvManager
from cluster.scheduling.output_reader import OutputReader
from cluster.scheduling.planner import Planner
from cluster.scheduling.policy import Preemptor
from cluster.scheduling.scheduler import Scheduler
from cluster.scheduling.sequence import Sequence
from cluster.scheduling.sequence_table import SequenceTable
from cluster.scheduling.tiers import BlockIndex, CpuTier, DiskTier
from cluster.serving.engine_client import EngineStream
from pagedray.channel import StepChannel

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PLANTED_BUGS", "PlantedBug"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedBug:
    """A text in the source of a method, and what it becomes."""

    name: str
    owner: type[Any]  # Any: the class of the method
    method: str
    right: str
    wrong: str

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Have the class the wrong method."""
        original = self.owner.__dict__[self.method]
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(self.right) == 1, f"{self.name}: the source has changed"
        names: dict[str, Any] = {}
        exec(source.replace(self.right, self.wrong), original.__globals__, names)
        setattr(self.owner, self.method, names[self.method])
        try:
            yield
        finally:
            setattr(self.owner, self.method, original)


def _bug(name: str, owner: type[Any], method: str, right: str, wrong: str) -> PlantedBug:
    return PlantedBug(name=name, owner=owner, method=method, right=right, wrong=wrong)


PLANTED_BUGS = (
    _bug(
        "a cached block is used and not owned",
        KvManager,
        "admit",
        "self.pool.share_all(hits)",
        "self.pool.share_all(hits[:-1])",
    ),
    _bug(
        "a prompt that is wholly cached computes nothing",
        KvManager,
        "_num_shareable",
        "(len(sequence.token_ids) - 1)",
        "len(sequence.token_ids)",
    ),
    _bug(
        "tenants share prefixes",
        DeviceTier,
        "root",
        'tenant.encode("utf-8", "surrogatepass")',
        "b''",
    ),
    _bug(
        "a block may be taken while it is copied out",
        KvManager,
        "swap_out",
        "self.pool.pin(source)",
        "pass",
    ),
    _bug(
        "a copied block is free a step too early",
        KvManager,
        "acknowledge",
        "self._swaps[0].step <= step",
        "self._swaps[0].step <= step + 1",
    ),
    _bug(
        "blocks of the CPU pool are never released",
        KvManager,
        "release",
        "self.cpu_pool.release(block)",
        "pass",
    ),
    _bug(
        "siblings write into the same block",
        KvManager,
        "fork",
        "if last_position % self.block_size == 0:",
        "if True:",
    ),
    _bug(
        "a sequence whose shared blocks were evicted is swapped in",
        KvManager,
        "swap_in",
        "if len(hits) < swapped.num_unswapped:",
        "if False:",
    ),
    _bug(
        "a cached block is read before it has been copied to the CPU pool",
        BlockIndex,
        "find_block",
        "or block in self._incomplete",
        "",
    ),
    _bug(
        "a block of the CPU pool is found after another took its place",
        BlockIndex,
        "_evict",
        "self._remove(block)",
        "del self._key_of[block]",
    ),
    _bug(
        "a sequence runs before its cached blocks are copied back",
        KvManager,
        "admit",
        "awaits_copies = awaits_copies or bool(loaded)",
        "pass",
    ),
    _bug(
        "a sequence that shares blocks being copied back runs at once",
        KvManager,
        "admit",
        "not self.device.arriving.isdisjoint(hits)",
        "False",
    ),
    _bug(
        "cached blocks in the memory of dead ranks are found",
        CpuTier,
        "begin_epoch",
        "self.clear()",
        "pass",
    ),
    _bug(
        "a block that was half copied when a rank died is found",
        BlockIndex,
        "retain_complete",
        " if one not in self._incomplete",
        "",
    ),
    _bug(
        "a pool counts as kept although that of a rank is new",
        PoolMemories,
        "note_reports",
        "self._is_lost or not report.is_kept",
        "False",
    ),
    _bug(
        "what ranks lost that died before they served is found",
        PoolMemories,
        "note_reports",
        "self._is_lost or not report.is_kept",
        "rank > 0 and self._is_lost or not report.is_kept",
    ),
    _bug(
        "a CPU block is taken while it is written to the disk",
        DiskTier,
        "take_writes",
        "pool.pin_cached(block)",
        "pass",
    ),
    _bug(
        "a disk block is taken while it is read",
        DiskTier,
        "read_blocks",
        "self.pool.pin_cached(source)",
        "pass",
    ),
    _bug(
        "a block that could not be read is found",
        DiskTier,
        "_end_reads",
        "self._cpu.fail_copy(target)",
        "self._cpu.end_copy(target)",
    ),
    _bug(
        "blocks in the files of dead ranks are found",
        KvManager,
        "clear",
        "self.disk.clear()",
        "pass",
    ),
    _bug(
        "a block is whole once one rank has it",
        DiskReports,
        "take_joined",
        "for block in part.failed",
        "for block in part.failed if part is parts[0]",
    ),
    _bug(
        "a sequence runs before its blocks have arrived",
        SequenceTable,
        "run_arrived",
        "if state.ready_step <= step",
        "if True",
    ),
    _bug("rows are lost", SequenceTable, "_leave_state", "self._free_rows.append(old.row)", "pass"),
    _bug(
        "a request that is dropped stays in the queue's count",
        SequenceTable,
        "remove_sequence",
        "if active.is_queued:",
        "if False:",
    ),
    _bug(
        "a sequence decodes on without a block for its tokens",
        Planner,
        "_prepare_decode",
        "min(sequence.blocks.num_slots, sequence.max_length - 1)",
        "sequence.max_length - 1",
    ),
    _bug(
        "a sequence that starts again decodes as far as before it lost its blocks",
        Sequence,
        "drop_blocks",
        "self.unchecked_until = 0",
        "pass",
    ),
    _bug(
        "tokens in flight count after new ranks have started",
        SequenceTable,
        "_reset_sequence",
        "sequence.prefill_end = len(sequence.token_ids)",
        "pass",
    ),
    _bug(
        "a preempted sequence keeps what it has computed",
        Preemptor,
        "_swap_or_release",
        "sequence.forget_computed()",
        "pass",
    ),
    _bug(
        "the token after an end is delivered",
        OutputReader,
        "_append_tokens",
        "if sequence.state is finished or (late and sequence in late):",
        "if late and sequence in late:",
    ),
    _bug(
        "plans of dead ranks stay in flight",
        EngineLoop,
        "_begin_epoch",
        "self._in_flight.clear()",
        "pass",
    ),
    _bug(
        "a late mask samples a token",
        Scheduler,
        "apply_masks",
        "self._kv.take_back(sequence)",
        "pass",
    ),
    _bug(
        "a frame is read before its last byte",
        StepChannel,
        "_frame_size",
        "len(self._received) >= size",
        "len(self._received) >= size - 1",
    ),
    _bug(
        "what a socket does not take is sent from its start",
        StepChannel,
        "post",
        "frame = frame[num_sent:]",
        "pass",
    ),
    _bug(
        "a request that kills its ranks is never ended",
        CrashHandler,
        "examine",
        "self._end(search.confirm_crash())",
        "[]",
    ),
    _bug(
        "a request that kills its ranks some steps after each start is never found",
        CrashSearch,
        "_note_margin",
        "if not self._are_steady:",
        "if True:",
    ),
    _bug(
        "a stream does not end with its request",
        EngineStream,
        "_end",
        "if not indices:",
        "if False:",
    ),
)
