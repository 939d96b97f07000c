"""The gRPC frontend on one port: the service, health and reflection, with or without TLS."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from grpc_reflection.v1alpha import reflection

from cluster.serving.listener import ConnectionLimits, listen, url_host
from cluster.serving.rpc.methods import HEALTH, EntryInterceptor, Health, method_handlers
from cluster.serving.rpc.requests import max_received_bytes
from cluster.serving.rpc.service import SERVICE

if TYPE_CHECKING:
    from cluster.serving.servicer import Servicer
    from cluster.serving.tls import Certificates, CertificateStore

__all__ = ["CHANNEL_OPTIONS", "MIN_STREAMS", "GrpcServer"]

MIN_STREAMS = 1024
"""Concurrent calls of one connection. Further calls wait in the client, but gRPC also counts
streams that have ended and are not freed yet: near the limit it rejects calls that did not wait
long enough."""
CHANNEL_OPTIONS = (
    # Otherwise a fast connection may send much more of a message than is being read.
    ("grpc.http2.bdp_probe", 0),
    # gRPC delays its own rejections by 0.1 to 1 s to slow abusers down, but meanwhile a call keeps
    # its memory and counts as open.
    ("grpc.http.tarpit", 0),
    # Metadata may be rejected above the first limit and always is above the second.
    ("grpc.max_metadata_size", 8 * 2**10),
    ("grpc.absolute_max_metadata_size", 16 * 2**10),
    # Until a client acknowledges the settings, gRPC accepts 16 MiB of metadata.
    ("grpc.http2.settings_timeout", 10_000),
    # Otherwise a second server could bind the same port and receive half of the calls.
    ("grpc.so_reuseport", 0),
    # Only identity: a compressed message may be small on the wire and huge in memory.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)


class GrpcServer:
    """The gRPC frontend, from binding its port to closing it."""

    def __init__(
        self,
        servicer: Servicer,
        *,
        host: str,
        port: int,
        certificates: CertificateStore | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        """Without certificates, TLS is disabled."""
        self._limits = ConnectionLimits() if limits is None else limits
        self._servicer = servicer
        self._host = host
        self._wanted_port = port
        self._certificates = certificates
        self._health = Health((SERVICE.full_name,))
        self._server: grpc.aio.Server | None = None
        self.port = 0
        """The bound port; 0 before the server has started."""

    async def start_server(self) -> None:
        """Bind the port and serve. Raises DeviceError if the port cannot be bound."""
        await self.set_serving(False)
        num_streams = max(MIN_STREAMS, 2 * self._servicer.config.max_num_seqs)
        options = (
            *CHANNEL_OPTIONS,
            ("grpc.max_concurrent_streams", num_streams),
            # Calls that wait for the event loop; above the first limit some are cancelled, above
            # the second all. Some connections may fill their streams at once without harm to
            # others.
            ("grpc.server.max_pending_requests", 4 * num_streams),
            ("grpc.server.max_pending_requests_hard_limit", 8 * num_streams),
            ("grpc.max_allowed_incoming_connections", self._limits.total),
            ("grpc.max_connection_idle_ms", int(self._limits.idle_s * 1e3)),
            ("grpc.max_connection_age_ms", int(self._limits.age_s * 1e3)),
            (
                "grpc.max_receive_message_length",
                max_received_bytes(self._servicer.intake.size.num_bytes),
            ),
        )
        server = grpc.aio.server(interceptors=(EntryInterceptor(self._servicer),), options=options)
        server.add_generic_rpc_handlers((method_handlers(self._servicer), self._health.handlers()))
        names = (SERVICE.full_name, HEALTH, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        # gRPC raises an error without the reason, so bind once to report it.
        listen("gRPC", self._host, self._wanted_port).close()
        address = f"{url_host(self._host)}:{self._wanted_port}"
        self.port = (
            server.add_insecure_port(address)
            if self._certificates is None
            else server.add_secure_port(address, _credentials(self._certificates))
        )
        await server.start()
        self._server = server

    async def set_serving(self, is_serving: bool) -> None:
        """Set the status that grpc.health.v1 reports."""
        await self._health.set_serving(is_serving)

    async def stop_server(self, grace_s: float) -> None:
        """Reject new calls and cancel calls that still run after `grace_s`."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace_s)


def _credentials(store: CertificateStore) -> grpc.ServerCredentials:
    given = store.current()

    # gRPC calls this in its own thread before every handshake.
    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        current = store.current()
        if current is given:
            return None
        given = current
        return _configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(given),
        fetch,  # type: ignore[arg-type]  # the stubs are narrower than the library
        require_client_authentication=store.needs_client_certificate,
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.certificate)], certificates.client_ca
    )
