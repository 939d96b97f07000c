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
from cluster.scheduling.groups import GroupTables
from cluster.scheduling.kv_manager import KvManager
from cluster.scheduling.output_reader import InFlightStep, OutputReader
from cluster.scheduling.planner import Planner
from cluster.scheduling.policy import Preemptor
from cluster.scheduling.prefix_cache import PrefixCache
from cluster.scheduling.scheduler import Scheduler
from cluster.scheduling.sequence import Sequence
from cluster.scheduling.sequence_blocks import SequenceBlocks
from cluster.scheduling.sequence_table import SequenceTable
from cluster.scheduling.speculation import Chain, Speculator
from cluster.scheduling.states import StateCopier
from cluster.scheduling.tiers import BlockIndex, CpuTier, DiskTier
from cluster.serving.engine_client import EngineStream
from pagedray.channel import StepChannel
from tests.scheduling.fake_worker import FakeWorker

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


_OWNERS: tuple[type[Any], ...] = (  # Any: classes of several kinds
    BlockIndex,
    Chain,
    CpuTier,
    CrashHandler,
    CrashSearch,
    DeviceTier,
    DiskReports,
    DiskTier,
    EngineLoop,
    EngineStream,
    FakeWorker,
    GroupTables,
    InFlightStep,
    KvManager,
    OutputReader,
    Planner,
    PoolMemories,
    PrefixCache,
    Preemptor,
    Scheduler,
    Sequence,
    SequenceBlocks,
    SequenceTable,
    Speculator,
    StateCopier,
    StepChannel,
)
_BUGS = """\
KvManager._share_prefix: a cached block is used and not owned
- self.pool.share_all(live)
+ self.pool.share_all(live[:-1])

PrefixCache.num_shareable: a prompt that is wholly cached computes nothing
- (len(sequence.token_ids) - 1)
+ len(sequence.token_ids)

DeviceTier.root: tenants share prefixes
- tenant.encode("utf-8", "surrogatepass")
+ b''

KvManager._pin_copied: a block may be taken while it is copied out
- self.pool.pin(block)
+ pass

KvManager.acknowledge: a copied block is free a step too early
- self._swaps[0].step <= step
+ self._swaps[0].step <= step + 1

KvManager.release: blocks of the CPU pool are never released
- for block in self.groups.live_blocks(sequence.state.cpu_ids):
+ for block in []:

KvManager.fork: siblings write into the same block
- if last_position % self.block_size == 0:
+ if True:

KvManager.swap_in: a sequence whose shared blocks were evicted is swapped in
- if len(hits) < swapped.num_unswapped * num_groups:
+ if False:

BlockIndex.find_block: a cached block is read before it has been copied to the CPU pool
- or block in self._incomplete
+ 

BlockIndex._evict: a block of the CPU pool is found after another took its place
- self._remove(block)
+ del self._key_of[block]

DeviceTier.load_blocks: a sequence runs before its cached blocks are copied back
- self.arriving.update(targets)
+ pass

KvManager.admit: a sequence that shares blocks being copied back runs at once
- not self.device.arriving.isdisjoint(
+ not {copy.target for copy in self.device._loads}.isdisjoint(

CpuTier.begin_epoch: cached blocks in the memory of dead ranks are found
- self.clear()
+ pass

BlockIndex.retain_complete: a block that was half copied when a rank died is found
-  if one not in self._incomplete
+ 

PoolMemories.note_reports: a pool counts as kept although that of a rank is new
- self._is_lost or not report.is_kept
+ False

PoolMemories.note_reports: what ranks lost that died before they served is found
- self._is_lost or not report.is_kept
+ rank > 0 and self._is_lost or not report.is_kept

DiskTier.take_writes: a CPU block is taken while it is written to the disk
- pool.pin_cached(block)
+ pass

DiskTier.read_blocks: a disk block is taken while it is read
- self.pool.pin_cached(source)
+ pass

DiskTier._end_reads: a block that could not be read is found
- self._cpu.fail_copy(target)
+ self._cpu.end_copy(target)

KvManager.clear: blocks in the files of dead ranks are found
- self.disk.clear()
+ pass

DiskReports.take_joined: a block is whole once one rank has it
- for block in part.failed
+ for block in part.failed if part is parts[0]

SequenceTable.run_arrived: a sequence runs before its blocks have arrived
- if state.ready_step <= step
+ if True

SequenceTable._leave_state: rows are lost
- self._free_rows.append(old.row)
+ pass

SequenceTable.remove_sequence: a request that is dropped stays in the queue's count
- if active.is_queued:
+ if False:

Planner._prepare_decode: a sequence decodes on without a block for its tokens
- num_slots if num_slots < last_position else last_position
+ last_position

Sequence.drop_blocks: a sequence that starts again decodes as far as before it lost its blocks
- self.unchecked_until = 0
+ pass

SequenceTable._reset_sequence: tokens in flight count after new ranks have started
- sequence.prefill_end = len(sequence.token_ids)
+ pass

Preemptor._swap_or_release: a preempted sequence keeps what it has computed
- sequence.forget_computed()
+ pass

OutputReader._append_tokens: the token after an end is delivered
- if sequence.state is finished or (late and sequence in late):
+ if late and sequence in late:

EngineLoop._begin_epoch: plans of dead ranks stay in flight
- self._in_flight.clear()
+ pass

Scheduler.apply_masks: a late mask samples a token
- self._kv.prefixes.take_back(sequence)
+ pass

StepChannel._frame_size: a frame is read before its last byte
- len(self._received) >= size
+ len(self._received) >= size - 1

StepChannel.post: what a socket does not take is sent from its start
- frame = frame[num_sent:]
+ pass

CrashHandler.examine: a request that kills its ranks is never ended
- self._end(search.confirm_crash())
+ []

CrashSearch._note_margin: a request that kills its ranks some steps after each start is never found
- if not self._are_steady:
+ if True:

EngineStream._end: a stream does not end with its request
- if not indices:
+ if False:

KvManager._release_dead: a block is released that the next query sees
- self.groups.num_dead(sequence.num_computed)
+ self.groups.num_dead(sequence.num_computed + 1)

KvManager._release_dead: the table keeps a released block
- block, blocks.ids[place] = blocks.ids[place], NO_BLOCK
+ block = blocks.ids[place]

KvManager._hold_blocks: blocks that a sequence never had are released behind its window
- sequence.blocks.num_dead = num_dead
+ sequence.blocks.num_dead = [0] * len(num_dead)

PrefixCache.key_at: groups share their cached blocks
- group_key(keys[index], group) if group else keys[index]
+ keys[index]

GroupTables.longest_prefix: a prefix is found without the first block of its window
- while index > needed and has(index - 1, group):
+ while index > needed and (index == needed + 1 or has(index - 1, group)):

PrefixCache._device_table: a sequence is swapped in without a block of its window
- num_entries = index
+ pass

KvManager.find_donor: a sequence is forked from a sibling that has released the prompt
- step, self.groups.num_dead(sequence.num_prompt_tokens - 1)
+ step

KvManager.fork: siblings share a block in all groups but the first
- for pair in zip(sources, targets, strict=False)
+ for pair in zip(sources, targets[:1], strict=False)

KvManager.swap_out: swapped blocks come back at other places of the table
- _filled(table, targets[:num_live])
+ targets[:num_live] + [NO_BLOCK] * (len(table) - num_live)

SequenceBlocks.extend: a prompt gets blocks in one group only
- // block_size) * num_groups
+ // block_size)

StateCopier._load: a state is not loaded
- self._planned.copies.extend(self._copies_between(states.load_ids, live))
+ pass

StateCopier._load: a snapshot may be taken by the plan that reads it
- self._held += states.load_ids
+ [self._device.pool.release(block) for block in states.load_ids]

StateCopier.begin_decode: a snapshot is made a token late
- (_GRIDS_PER_DECODE * self.grid) == 0
+ (_GRIDS_PER_DECODE * self.grid) == 1

StateCopier.make_snapshot: a snapshot is found under the key of another position
- state_keys(sequence, save.position))
+ state_keys(sequence, save.position - self.grid))

StateCopier._state_blocks: a state is copied to the row of another sequence
- index * self.num_blocks
+ index * (self.num_blocks - 1)

StateCopier.make_snapshot: two states of a plan are saved to one spare state
- + len(planned.saves)
+ + 0

StateCopier.make_snapshot: a state within a chunk is copied before it is computed
- else planned.late_copies
+ else planned.copies

StateCopier.make_snapshot: a state is saved at another position
- StateSave(sequence.state.row, save.position)
+ StateSave(sequence.state.row, save.position - 1)

StateCopier.end_chunk: a chunk that ends at a snapshot passes it
- states.wanted[-1] <= end
+ states.wanted[-1] < end

StateCopier.release: blocks of a state that was not loaded are lost
- self._device.pool.release(block)
+ pass

DeviceTier.add_block: a block in use may be evicted after its tokens were computed again
- self.pool.touch(self._block_of[key.digest])
+ self.pool._idle[self._block_of[key.digest]] = None

StateCopier._forget_replaced: a replaced snapshot is found while another takes its place
- self._device.forget_block(block)
+ self._device.pool.discard(block)

PrefixCache._longest_prefix: a prefix is found without its state
- while most and not
+ while False and not

PrefixCache.state_keys: the parts of a state have the same key
- - 1], part)
+ - 1], 0)

KvManager._share_prefix: a snapshot is used and not owned
-  + prefix.state_ids
+ 

KvManager.admit: a sequence runs before its state is copied back
- (*hits, *state_ids)
+ hits

KvManager.swap_in: a state is not swapped in
- [*sources, *swapped.state_ids]
+ [*sources]

KvManager.find_donor: a sibling takes in the last token of the prompt again
- return None
+ pass

Planner._admit: a token without a mask in time is taken in twice
- if sequence.awaits_mask:
+ if False:

Sequence.refuse_drafts: a token behind a wrong draft counts as computed
- self.num_computed -= number
+ self.num_computed -= max(number - 1, 0)

Scheduler._plan_step: drafts follow a token that is not known
- may_speculate=not self._in_flight
+ may_speculate=True

Scheduler._waits_for_tokens: a plan is made before the length of a sequence is known
- if last.chains or (last.plan.num_drafts and not speculator.is_trying):
+ if False:

OutputReader._read_chains: the token behind a wrong draft is delivered
- token_ids[: num_accepted + 1]
+ token_ids[: num_accepted + 2]

OutputReader._append_chain: tokens after an end inside a chain are delivered
- if reason is not None:
+ if False:

Speculator.buy_drafts: a chain begins behind the last known token
- len(offer.sequence.token_ids) - 1
+ len(offer.sequence.token_ids)

Planner._hold_chain: drafts are planned without blocks
- min(end, sequence.blocks.num_slots)
+ end

OutputReader._read_chains: a draft without a mask is accepted
- chain.draft_ids[: chain.num_usable]
+ chain.draft_ids

InFlightStep.note_late: the drafts behind a late mask count as computed
- sequence.refuse_drafts(len(chain.draft_ids))
+ pass

Scheduler.apply_masks: masks that end before the drafts are not noted
- if made.cut:
+ if False:

FakeWorker._accept: a state takes in a token behind the last right draft
- position - plan.first_position)
+ min(position - plan.first_position + 1, plan.num_tokens))

FakeWorker._accept: a state lacks the last right draft
- position - plan.first_position)
+ max(position - plan.first_position - 1, 1))

StateCopier.make_snapshot: a snapshot before a chain has the key of its drafts
- (self._prefixes.state_keys(sequence, save.position))
+ (self._prefixes.state_keys(sequence, sequence.num_computed // self.grid * self.grid))

Planner.plan_step: prompts and chains are in one plan of a model with states
- has_room = self._states is None or not plan.prefilled
+ has_room = True

OutputReader._read_chains: wrong drafts are taken back twice
- (len(chain.draft_ids) - num_accepted)
+ (2 * (len(chain.draft_ids) - num_accepted))

OutputReader._read_chains: tokens behind an end in the step before are delivered
- if sequence.state is FINISHED:
+ if False:

InFlightStep.keep_guesses: drafts are the guesses of another row
- enumerate(self.sampled_sequences)
+ enumerate(self.sampled_sequences[::-1])

Chain.with_guesses: drafts are guesses behind another token
- drafts.head_ids[: len(self.draft_ids)]
+ drafts.head_ids[-len(self.draft_ids) :]

Speculator.most_drafts: more drafts are planned than guessed
- last.num_drafts
+ last.num_drafts + 1

Planner.continue_plan: a token is planned behind the limit of the model
- self._max_model_len - 2
+ self._max_model_len

Planner.continue_plan: a position that may be reached has no block
- if position < sequence.blocks.num_slots:
+ if True:

Planner.continue_plan: an overlapped plan does not say that its positions are too high
- plan.is_overlapped = speculator.has_head or bool(last.chains)
+ pass

Planner.may_continue: a sequence is continued that was not in the step before
- sequence in sampled
+ True

Planner.may_continue: masks are made before the drafts are known
- and not sequence.may_be_masked(num_tokens=num_tokens)
+ 

Planner._hold_slots: a block is released that a query behind a wrong draft sees
- min(first, len(sequence.token_ids))
+ first
"""


def _parse_bug(text: str) -> PlantedBug:
    """Return the bug of a line with its method and name, and two lines with the change."""
    head, right, wrong = text.strip("\n").split("\n")
    place, name = head.split(": ")
    owner, method = place.split(".")
    return PlantedBug(
        name=name,
        owner=next(one for one in _OWNERS if one.__name__ == owner),
        method=method,
        right=right.removeprefix("- "),
        wrong=wrong.removeprefix("+ "),
    )


PLANTED_BUGS = tuple(_parse_bug(text) for text in _BUGS.split("\n\n"))
