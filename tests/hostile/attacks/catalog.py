"""All attacks, by the names of their modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.hostile.attacks.calls.cache_salts import CacheSalts
from tests.hostile.attacks.calls.cancelled_calls import CancelledCalls
from tests.hostile.attacks.calls.conversations.forged_roles import ForgedRoles
from tests.hostile.attacks.calls.conversations.many_blocks import ManyBlocks
from tests.hostile.attacks.calls.conversations.many_messages import ManyMessages
from tests.hostile.attacks.calls.conversations.many_parts import ManyParts
from tests.hostile.attacks.calls.conversations.template_variables import TemplateVariables
from tests.hostile.attacks.calls.costly_grammar import CostlyGrammar
from tests.hostile.attacks.calls.escaped_text import EscapedText
from tests.hostile.attacks.calls.grpc_messages.empty_messages import EmptyMessages
from tests.hostile.attacks.calls.grpc_messages.hidden_fields import HiddenFields
from tests.hostile.attacks.calls.grpc_messages.packed_ids import PackedIds
from tests.hostile.attacks.calls.id_lists import IdLists
from tests.hostile.attacks.calls.large_responses import LargeResponses
from tests.hostile.attacks.calls.long_stops import LongStops
from tests.hostile.attacks.calls.long_texts import LongTexts
from tests.hostile.attacks.calls.many_members import ManyMembers
from tests.hostile.attacks.calls.many_pairs import ManyPairs
from tests.hostile.attacks.calls.prompt_reports import PromptReports
from tests.hostile.attacks.calls.short_texts import ShortTexts
from tests.hostile.attacks.calls.tools.counted_tools import CountedTools
from tests.hostile.attacks.calls.tools.echoed_tools import EchoedTools
from tests.hostile.attacks.calls.tools.large_tools import LargeTools
from tests.hostile.attacks.calls.tools.many_tool_calls import ManyToolCalls
from tests.hostile.attacks.calls.valid_calls import ValidCalls
from tests.hostile.attacks.calls.valid_streams import ValidStreams
from tests.hostile.attacks.connections.allowed_preflights import AllowedPreflights
from tests.hostile.attacks.connections.dns_rebinding import DnsRebinding
from tests.hostile.attacks.connections.held_heads import HeldHeads
from tests.hostile.attacks.connections.http2.continuation_flood import ContinuationFlood
from tests.hostile.attacks.connections.http2.header_bomb import HeaderBomb
from tests.hostile.attacks.connections.http2.header_bombs import HeaderBombs
from tests.hostile.attacks.connections.http2.header_name_bomb import HeaderNameBomb
from tests.hostile.attacks.connections.http2.held_headers import HeldHeaders
from tests.hostile.attacks.connections.http2.ping_flood import PingFlood
from tests.hostile.attacks.connections.http2.rapid_reset import RapidReset
from tests.hostile.attacks.connections.http2.settings_flood import SettingsFlood
from tests.hostile.attacks.connections.http2.unacknowledged_bombs import UnacknowledgedBombs
from tests.hostile.attacks.connections.idle_connections import IdleConnections
from tests.hostile.attacks.connections.keyless_calls import KeylessCalls
from tests.hostile.attacks.connections.keyless_requests import KeylessRequests
from tests.hostile.attacks.connections.many_headers import ManyHeaders
from tests.hostile.attacks.connections.new_health_checks import NewHealthChecks
from tests.hostile.attacks.connections.preflights import Preflights
from tests.hostile.attacks.connections.slow_heads import SlowHeads
from tests.hostile.attacks.connections.small_chunks import SmallChunks
from tests.hostile.attacks.connections.smuggling import Smuggling
from tests.hostile.attacks.connections.unending_bodies import UnendingBodies
from tests.hostile.attacks.connections.unending_messages import UnendingMessages
from tests.hostile.attacks.connections.watch_calls import WatchCalls

if TYPE_CHECKING:
    from tests.hostile.attack import Attack

__all__ = ["ATTACKS"]

ATTACKS: dict[str, type[Attack]] = {
    kind.__module__.rpartition(".")[2]: kind
    for kind in (
        AllowedPreflights,
        CacheSalts,
        CancelledCalls,
        ContinuationFlood,
        CostlyGrammar,
        CountedTools,
        DnsRebinding,
        EchoedTools,
        EmptyMessages,
        EscapedText,
        ForgedRoles,
        HeaderBomb,
        HeaderBombs,
        HeaderNameBomb,
        HeldHeaders,
        HeldHeads,
        HiddenFields,
        IdLists,
        IdleConnections,
        KeylessCalls,
        KeylessRequests,
        LargeResponses,
        LargeTools,
        LongStops,
        LongTexts,
        ManyBlocks,
        ManyHeaders,
        ManyMembers,
        ManyMessages,
        ManyPairs,
        ManyParts,
        ManyToolCalls,
        NewHealthChecks,
        PackedIds,
        PingFlood,
        Preflights,
        PromptReports,
        RapidReset,
        SettingsFlood,
        ShortTexts,
        SlowHeads,
        SmallChunks,
        Smuggling,
        TemplateVariables,
        UnacknowledgedBombs,
        UnendingBodies,
        UnendingMessages,
        ValidCalls,
        ValidStreams,
        WatchCalls,
    )
}
