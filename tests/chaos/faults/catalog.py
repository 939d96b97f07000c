"""All faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.chaos.faults.clients.cut_connections import CutConnections
from tests.chaos.faults.clients.disconnect_clients import DisconnectClients
from tests.chaos.faults.clients.hostile_input import HostileInput
from tests.chaos.faults.clients.stall_readers import StallReaders
from tests.chaos.faults.exhaust_descriptors import ExhaustDescriptors
from tests.chaos.faults.fill_disk import FillDisk
from tests.chaos.faults.pause_everything import PauseEverything
from tests.chaos.faults.ranks.hang_rank import HangRank
from tests.chaos.faults.ranks.kill_during_replacement import KillDuringReplacement
from tests.chaos.faults.ranks.kill_rank import KillRank
from tests.chaos.faults.ranks.kill_two_ranks import KillTwoRanks
from tests.chaos.faults.ranks.stop_rank import StopRank
from tests.chaos.faults.ray_daemons.hang_daemon import HangGcs, HangRaylet
from tests.chaos.faults.ray_daemons.kill_daemon import KillGcs, KillRaylet
from tests.chaos.faults.ray_serve.hang_replica import HangReplica
from tests.chaos.faults.ray_serve.kill_replica import KillReplica
from tests.chaos.faults.ray_serve.kill_serve_controller import KillServeController
from tests.chaos.faults.terminate import Terminate

if TYPE_CHECKING:
    from tests.chaos.faults.fault import Fault

__all__ = ["FAULTS"]

FAULTS: tuple[type[Fault], ...] = (
    KillRank,
    KillTwoRanks,
    KillDuringReplacement,
    StopRank,
    PauseEverything,
    DisconnectClients,
    CutConnections,
    StallReaders,
    HostileInput,
    Terminate,
    HangRank,
    FillDisk,
    ExhaustDescriptors,
    HangReplica,
    KillGcs,
    KillRaylet,
    HangGcs,
    HangRaylet,
    KillReplica,
    KillServeController,
)
"""Each has a row in docs/reliability.md."""
