"""Every attack in its short form: others are served, and nothing but times may suffer.

Times are not asserted, since the machine may be busy; `make test-hostile` measures them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.hostile.attack import Target
from tests.hostile.catalog import ATTACKS
from tests.hostile.trial import HostileServer, ServerOptions, Trial, attacker_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import ProcessPoolExecutor

    from tests.hostile.attack import Attack

_LONG_PROMPT = {"model": "tiny-llama", "prompt": "word " * 500, "max_tokens": 1}
"""A prompt that a thread tokenizes."""
_FLOOD_S = 0.5
_SLOW = (
    "allowed_preflights",
    "cache_salts",
    "cancelled_calls",
    "continuation_flood",
    "costly_grammar",
    "counted_tools",
    "echoed_tools",
    "empty_messages",
    "escaped_text",
    "header_bombs",
    "header_name_bomb",
    "held_headers",
    "id_lists",
    "idle_connections",
    "keyless_requests",
    "large_tools",
    "long_texts",
    "many_blocks",
    "many_headers",
    "many_members",
    "many_messages",
    "many_pairs",
    "many_parts",
    "many_tool_calls",
    "new_health_checks",
    "packed_ids",
    "ping_flood",
    "prompt_reports",
    "settings_flood",
    "slow_heads",
    "small_chunks",
    "template_variables",
    "unacknowledged_bombs",
    "unending_bodies",
    "unending_messages",
    "valid_calls",
    "valid_streams",
    "watch_calls",
)
"""The longest attacks, whose defenses other tests cover in part."""


@pytest.fixture(scope="module")
def attacker() -> Iterator[ProcessPoolExecutor]:
    with attacker_process() as process:
        yield process


@pytest.fixture(scope="module")
def server_for() -> Iterator[Callable[[Attack], HostileServer]]:
    """Servers that attacks with the same options share."""
    servers: dict[ServerOptions, HostileServer] = {}
    with ExitStack() as stack:

        def start(attack: Attack) -> HostileServer:
            options = ServerOptions.of(attack)
            if options not in servers:
                servers[options] = stack.enter_context(HostileServer(options))
            return servers[options]

        yield start


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in _SLOW else [])
        for name in sorted(ATTACKS)
    ],
)
async def test_attack_harms_nobody_else(
    server_for: Callable[[Attack], HostileServer], attacker: ProcessPoolExecutor, name: str
) -> None:
    attack = ATTACKS[name]
    trial = Trial(server_for(attack), attacker)
    await trial.warm_up(0.0)
    outcome = await trial.run(attack, seconds=attack.fast_s, before_s=0.0, after_s=0.0)
    assert outcome.damage() == []


def test_long_prompts_are_answered_beside_those_of_another_tenant(
    server_for: Callable[[Attack], HostileServer], attacker: ProcessPoolExecutor
) -> None:
    attack = ATTACKS["long_texts"]
    server = server_for(attack)
    measured = server.measured
    target = Target(
        http_port=measured.http_port, grpc_port=measured.grpc_port, key=server.keys["hostile"]
    )
    attacking = attacker.submit(attack.run, target, _FLOOD_S)
    headers = {"authorization": f"Bearer {server.keys['honest']}"}
    statuses: list[int] = []
    with httpx.Client(
        base_url=f"http://127.0.0.1:{measured.http_port}", headers=headers, timeout=60.0
    ) as client:
        # At least one, though the machine may have been busy until the end of the attack.
        while not (attacking.done() and statuses):
            statuses.append(client.post("/v1/completions", json=_LONG_PROMPT).status_code)
    assert attacking.result().broken == ()
    assert set(statuses) == {200}
