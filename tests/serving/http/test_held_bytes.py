"""How the bytes of incomplete heads are counted, for one connection and for all."""

from __future__ import annotations

from cluster.serving.http.held_bytes import MAX_HEAD_BYTES, HeldBytes, HeldTotal


def test_completed_heads_leave_the_total() -> None:
    total = HeldTotal()
    connections = [HeldBytes(total) for _ in range(3)]
    for held in connections:
        held.add(100)
        held.update_total()
    assert total.num_bytes == 300
    connections[0].add(50)
    connections[0].forget()
    connections[0].update_total()
    assert total.num_bytes == 200


def test_only_long_heads_need_room_while_all_hold_much() -> None:
    total = HeldTotal()
    connections = [HeldBytes(total) for _ in range(257)]
    for held in connections:
        held.add(MAX_HEAD_BYTES)
        held.update_total()
    assert not connections[0].is_long
    assert connections[0].has_no_room
    short = HeldBytes(total)
    short.add(4096)
    short.update_total()
    assert not short.has_no_room
