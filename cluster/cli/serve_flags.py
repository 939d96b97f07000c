"""The flags of `pagedray serve` besides the flags of its engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli.flag import count, group_of, names, seconds
from cluster.serving.buffers import BufferLimits
from cluster.serving.intake import IntakeLimits
from cluster.serving.reasoning import REASONING_FORMATS
from cluster.serving.tools.tool_calls import TOOL_CALL_FORMATS

if TYPE_CHECKING:
    import argparse

    _Group = argparse._ArgumentGroup

__all__ = [
    "CONFIG_FLAG",
    "DEFAULT_GRPC_PORT",
    "DEFAULT_HTTP_PORT",
    "add_model_names",
    "add_serve_flags",
]

CONFIG_FLAG = "--config"
DEFAULT_GRPC_PORT = 9000
DEFAULT_HTTP_PORT = 8000

_FILES = {
    "--api-keys": "Keys of clients, from `pagedray keys new`. (default: no key is required)",
    "--tls-cert": "TLS certificate chain in PEM format. (default: no TLS)",
    "--tls-key": "Private key of --tls-cert in PEM format.",
    "--tls-client-ca": "CA certificates in PEM format, one of which must have signed a client's.",
}
_FILE_ALIASES = {"--tls-cert": ("--ssl-certfile",), "--tls-key": ("--ssl-keyfile",)}


def add_serve_flags(serve: argparse.ArgumentParser) -> None:
    """Add the groups of the frontends, and of logging and tracing."""
    serve.add_argument(
        CONFIG_FLAG,
        type=Path,
        metavar="FILE",
        help="YAML file of flags, such as `max-model-len: 32K`, and optionally `model`.",
    )
    add_model_names(group_of(serve, "model"))
    _add_ports(group_of(serve, "clients"))
    _add_request_limits(group_of(serve, "limits on requests"))
    _add_reader_limits(group_of(serve, "streams and stored responses"))
    _add_logging(group_of(serve, "logging and tracing"))


def _add_ports(group: _Group) -> None:
    """Add where the frontends listen, for whom, and how long they drain."""
    group.add_argument("--host", default="127.0.0.1", help="Address to listen on.")
    group.add_argument(
        "--http-port",
        "--port",
        type=int,
        default=DEFAULT_HTTP_PORT,
        metavar="PORT",
        help="Port for HTTP; 0 selects a free port.",
    )
    group.add_argument(
        "--grpc-port",
        type=int,
        metavar="PORT",
        help="Port for gRPC; 0 selects a free port. (default: 9000; with another --http-port than "
        "8000, the first free port from 9000 on)",
    )
    for flag, what in _FILES.items():
        flags = [flag, *_FILE_ALIASES.get(flag, ())]
        group.add_argument(*flags, type=Path, metavar="FILE", help=what)
    group.add_argument(
        "--api-key",
        nargs="+",
        metavar="KEY",
        help="Keys of one tenant, in place of --api-keys; other users of the machine can see them.",
    )
    group.add_argument(
        "--allowed-hosts",
        type=names,
        metavar="NAME,NAME",
        help="Without keys, host names that the server answers for besides IP addresses, localhost "
        "and --host; * is all. (default: none)",
    )
    group.add_argument(
        "--allowed-origins",
        type=names,
        metavar="ORIGIN,ORIGIN",
        help="Origins such as https://example.com of web pages that may use the server; * is all. "
        "(default: none)",
    )
    group.add_argument(
        "--drain-s",
        "--shutdown-timeout",
        type=seconds(0.0, 86400.0),
        default=30.0,
        metavar="SECONDS",
        help="Time for running requests to finish after SIGTERM.",
    )


def _add_request_limits(group: _Group) -> None:
    """Add how large and how slow requests may be, and which parameters they may have."""
    group.add_argument(
        "--strict-parameters",
        action="store_true",
        help="Reject HTTP parameters that have no effect, instead of ignoring them.",
    )
    group.add_argument(
        "--read-timeout-s",
        type=seconds(1.0, 3600.0),
        default=IntakeLimits().read_timeout_s,
        metavar="SECONDS",
        help="Time within which the body of a request must arrive.",
    )
    group.add_argument(
        "--max-request-kib",
        type=count(64, 8 * 2**10),
        metavar="KIB",
        help="Maximum size of the body of a request. (default: 1 MiB plus 8 bytes for each token "
        "of 128 prompts, up to 4 MiB)",
    )
    group.add_argument(
        "--receive-buffer-mib",
        type=count(64, 2**20),
        default=BufferLimits().total_bytes // 2**20,
        metavar="MIB",
        help="Memory for requests that are being received, a quarter of it for each tenant.",
    )


def _add_reader_limits(group: _Group) -> None:
    """Add how long the server waits for readers of streams, and how much it keeps for them."""
    group.add_argument(
        "--write-timeout-s",
        type=seconds(1.0, 86400.0),
        default=60.0,
        metavar="SECONDS",
        help="Time within which a client must accept a message of a stream.",
    )
    group.add_argument(
        "--unread-output-mib",
        type=count(32, 2**20),
        default=BufferLimits().total_bytes // 2**20,
        metavar="MIB",
        help="Memory for output that clients have not read, a quarter of it for each tenant.",
    )
    group.add_argument(
        "--resume-grace-s",
        type=seconds(0.0, 3600.0),
        default=30.0,
        metavar="SECONDS",
        help="Time to resume a resumable stream after its connection was cut; 0 disables them.",
    )
    group.add_argument(
        "--resume-buffer-mib",
        type=count(32, 2**20),
        default=BufferLimits().total_bytes // 2**20,
        metavar="MIB",
        help="Memory for resumable streams.",
    )
    group.add_argument(
        "--stored-responses",
        type=count(0, 10**6),
        default=1000,
        metavar="N",
        help="Maximum responses of /v1/responses that are stored for each tenant.",
    )
    group.add_argument(
        "--stored-responses-mib",
        type=count(32, 2**20),
        default=BufferLimits().total_bytes // 2**20,
        metavar="MIB",
        help="Memory for stored responses.",
    )
    group.add_argument(
        "--resume-anonymous",
        action="store_true",
        help="Without --api-keys, resume streams for anyone who knows their ids.",
    )


def add_model_names(group: _Group) -> None:
    """Add how clients call the model, and how the model writes tool calls and reasoning."""
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="Names of the model for clients. (default: the name of the folder, or the Hub id)",
    )
    group.add_argument(
        "--tool-call-format",
        "--tool-call-parser",
        choices=TOOL_CALL_FORMATS,
        metavar="FORMAT",
        help=f"Format of tool calls: {', '.join(TOOL_CALL_FORMATS)}. (default: detected)",
    )
    group.add_argument(
        "--reasoning-format",
        "--reasoning-parser",
        choices=REASONING_FORMATS,
        metavar="FORMAT",
        help=f"Format of reasoning: {', '.join(REASONING_FORMATS)}. (default: detected)",
    )


def _add_logging(group: _Group) -> None:
    group.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="Format of log lines."
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning"),
        default="info",
        help="Minimum log level; warning omits the line of each call.",
    )
    group.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="OpenTelemetry collector of traces. (default: OTEL_EXPORTER_OTLP_ENDPOINT, or none)",
    )
