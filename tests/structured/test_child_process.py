"""Frames on a socket whose other end does not read."""

from __future__ import annotations

import socket

from cluster.structured.child_process import has_unread_bytes, read_frame, write_frame


def test_unread_bytes_are_noticed_until_they_are_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not has_unread_bytes(ours)
        num_frames = 0
        ours.setblocking(False)
        while not has_unread_bytes(ours):
            write_frame(ours, bytes(1000))
            num_frames += 1
        # A short frame still fits, so that nothing ever waits for the other end.
        write_frame(ours, b"")
        for _ in range(num_frames):
            assert len(read_frame(theirs)) == 1000
        assert not read_frame(theirs)
        assert not has_unread_bytes(ours)
