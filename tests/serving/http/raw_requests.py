"""Requests of HTTP/1.1 as bytes, and connections that send them."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.serving.conftest import Server

__all__ = [
    "BODY",
    "CHUNKED",
    "HOST",
    "IN_CHUNKS",
    "JSON_HEAD",
    "chunked",
    "connect",
    "post",
    "read_to_end",
]

HOST = b"Host: localhost\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
BODY = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 2, "ignore_eos": True}).encode()
IN_CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
"""The body in one chunk, with the last chunk."""
JSON_HEAD = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n" + HOST


def post(body: bytes, *, num_declared: int | None = None) -> bytes:
    """Return the bytes of a request."""
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (num_declared or len(body), body)
    )


def connect(server: Server) -> socket.socket:
    """Return a connection to a server, which the caller closes."""
    return socket.create_connection(("127.0.0.1", server.frontends.http_port or 0), 60)


def read_to_end(connection: socket.socket) -> bytes:
    """Return what is received until the server closes the connection."""
    received = b""
    while chunk := connection.recv(2**16):
        received += chunk
    return received


def chunked(body: bytes, *, chunk_bytes: int) -> bytes:
    """Return the bytes of a request whose body is in chunks."""
    parts = [body[at : at + chunk_bytes] for at in range(0, len(body), chunk_bytes)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return JSON_HEAD + CHUNKED + b"\r\n" + chunks + b"0\r\n\r\n"
