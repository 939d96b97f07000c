"""The flags of `pagedray serve` besides the flags of its engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli.flag import count, flag_adder, group_of, names, seconds
from cluster.serving.intake import BufferLimits, IntakeLimits
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
    add = flag_adder(group)
    add("--host: Address to listen on.", default="127.0.0.1")
    add("--http-port --port PORT: Port for HTTP; 0 selects a free port.", int, DEFAULT_HTTP_PORT)
    add(
        "--grpc-port PORT: Port for gRPC; 0 selects a free port. (default: 9000; with another "
        "--http-port than 8000, the first free port from 9000 on)",
        int,
    )
    add(
        "--api-keys FILE: Keys of clients, from `pagedray keys new`. (default: no key is required)",
        Path,
    )
    add(
        "--tls-cert --ssl-certfile FILE: TLS certificate chain in PEM format. (default: no TLS)",
        Path,
    )
    add("--tls-key --ssl-keyfile FILE: Private key of --tls-cert in PEM format.", Path)
    add(
        "--tls-client-ca FILE: CA certificates in PEM format, one of which must have signed a "
        "client's.",
        Path,
    )
    add(
        "--api-key KEY: Keys of one tenant, in place of --api-keys; other users of the machine can "
        "see them.",
        nargs="+",
    )
    add(
        "--allowed-hosts NAME,NAME: Without keys, host names that the server answers for besides "
        "IP addresses, localhost and --host; * is all. (default: none)",
        names,
    )
    add(
        "--allowed-origins ORIGIN,ORIGIN: Origins such as https://example.com of web pages that "
        "may use the server; * is all. (default: none)",
        names,
    )
    add(
        "--drain-s --shutdown-timeout SECONDS: Time for running requests to finish after SIGTERM.",
        seconds(0.0, 86400.0),
        30.0,
    )


def _add_request_limits(group: _Group) -> None:
    """Add how large and how slow requests may be, and which parameters they may have."""
    add = flag_adder(group)
    add(
        "--strict-parameters: Reject HTTP parameters that have no effect, instead of ignoring them."
    )
    add(
        "--read-timeout-s SECONDS: Time within which the body of a request must arrive.",
        seconds(1.0, 3600.0),
        IntakeLimits().read_timeout_s,
    )
    add(
        "--max-request-kib KIB: Maximum size of the body of a request. (default: 1 MiB plus 8 "
        "bytes for each token of 128 prompts, up to 4 MiB)",
        count(64, 8 * 2**10),
    )
    add(
        "--receive-buffer-mib MIB: Memory for requests that are being received, a quarter of it "
        "for each tenant.",
        count(64, 2**20),
        BufferLimits().total_bytes // 2**20,
    )


def _add_reader_limits(group: _Group) -> None:
    """Add how long the server waits for readers of streams, and how much it keeps for them."""
    add = flag_adder(group)
    add(
        "--write-timeout-s SECONDS: Time within which a client must accept a message of a stream.",
        seconds(1.0, 86400.0),
        60.0,
    )
    add(
        "--unread-output-mib MIB: Memory for output that clients have not read, a quarter of it "
        "for each tenant.",
        count(32, 2**20),
        BufferLimits().total_bytes // 2**20,
    )
    add(
        "--resume-grace-s SECONDS: Time to resume a resumable stream after its connection was cut; "
        "0 disables them.",
        seconds(0.0, 3600.0),
        30.0,
    )
    add(
        "--resume-buffer-mib MIB: Memory for resumable streams.",
        count(32, 2**20),
        BufferLimits().total_bytes // 2**20,
    )
    add(
        "--stored-responses N: Maximum responses of /v1/responses that are stored for each tenant.",
        count(0, 10**6),
        1000,
    )
    add(
        "--stored-responses-mib MIB: Memory for stored responses.",
        count(32, 2**20),
        BufferLimits().total_bytes // 2**20,
    )
    add("--resume-anonymous: Without --api-keys, resume streams for anyone who knows their ids.")


def add_model_names(group: _Group) -> None:
    """Add the flags for the names of the model and for its formats of tool calls and reasoning."""
    add = flag_adder(group)
    add(
        "--served-model-name NAME: Names of the model for clients. (default: the name of the "
        "folder, or the Hub id)",
        nargs="+",
    )
    add(
        f"--tool-call-format --tool-call-parser FORMAT: Format of tool calls: "
        f"{', '.join(TOOL_CALL_FORMATS)}. (default: detected)",
        TOOL_CALL_FORMATS,
    )
    add(
        f"--reasoning-format --reasoning-parser FORMAT: Format of reasoning: "
        f"{', '.join(REASONING_FORMATS)}. (default: detected)",
        REASONING_FORMATS,
    )


def _add_logging(group: _Group) -> None:
    add = flag_adder(group)
    add("--log-format: Format of log lines.", ("text", "json"), "text")
    add(
        "--log-level: Minimum log level; warning omits the line of each call.",
        ("debug", "info", "warning"),
        "info",
    )
    add(
        "--otlp-endpoint URL: OpenTelemetry collector of traces. (default: "
        "OTEL_EXPORTER_OTLP_ENDPOINT, or none)"
    )
