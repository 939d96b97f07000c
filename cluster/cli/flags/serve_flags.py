"""The flags of `pagedray serve` besides those of its engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli.flags.flag_values import count, names, seconds
from cluster.serving.intake.limits import IntakeLimits
from cluster.serving.memory.tenant_bytes import BufferLimits
from cluster.serving.reasoning.formats import REASONING_FORMATS
from cluster.serving.tools.tool_calls import TOOL_CALL_FORMATS

if TYPE_CHECKING:
    import argparse

    _Group = argparse._ArgumentGroup

__all__ = ["CONFIG_FLAG", "DEFAULT_GRPC_PORT", "DEFAULT_HTTP_PORT", "add_serve_flags"]

CONFIG_FLAG = "--config"
DEFAULT_GRPC_PORT = 9000
DEFAULT_HTTP_PORT = 8000

_FILES = {
    "--api-keys": "File of API keys; requests without a valid key are rejected. `pagedray keys "
    "new` creates a key. (default: no key is required)",
    "--tls-cert": "TLS certificate chain in PEM format, which is reloaded when it changes. "
    "(default: no TLS)",
    "--tls-key": "Private key of --tls-cert in PEM format.",
    "--tls-client-ca": "CA certificates in PEM format; clients must present a certificate "
    "signed by one of them.",
}
_FILE_ALIASES = {"--tls-cert": ("--ssl-certfile",), "--tls-key": ("--ssl-keyfile",)}


def add_serve_flags(serve: argparse.ArgumentParser) -> None:
    """Add the groups of the frontends, and of logging and tracing."""
    serve.add_argument(
        CONFIG_FLAG,
        type=Path,
        metavar="FILE",
        help="YAML file of flags, such as `max-model-len: 32K`, and optionally `model`; flags "
        "on the command line take precedence.",
    )
    group = serve.add_argument_group("frontends")
    _add_ports(group)
    _add_request_limits(group)
    _add_reader_limits(group)
    _add_model_names(group)
    _add_logging(serve.add_argument_group("logging and tracing"))


def _add_ports(group: _Group) -> None:
    """Add where the frontends listen, for whom, and how long they drain."""
    group.add_argument("--host", default="127.0.0.1", help="Address to listen on.")
    group.add_argument(
        "--grpc-port",
        type=int,
        metavar="PORT",
        help="Port for gRPC; 0 selects a free one. (default: 9000; with another --http-port than "
        "8000, the first free port from 9000 on)",
    )
    group.add_argument(
        "--http-port",
        "--port",
        type=int,
        default=DEFAULT_HTTP_PORT,
        metavar="PORT",
        help="Port for HTTP; 0 selects a free one.",
    )
    group.add_argument(
        "--allowed-hosts",
        type=names,
        metavar="NAME,NAME",
        help="Without --api-keys, host names that HTTP requests are answered for, in addition "
        "to IP addresses, localhost and --host; * allows all. Web pages of these hosts may "
        "use the server. (default: none)",
    )
    group.add_argument(
        "--allowed-origins",
        type=names,
        metavar="ORIGIN,ORIGIN",
        help="Origins such as https://example.com whose web pages may use the HTTP API from a "
        "browser; * allows all. (default: only the server's own page)",
    )
    for flag, what in _FILES.items():
        flags = [flag, *_FILE_ALIASES.get(flag, ())]
        group.add_argument(*flags, type=Path, metavar="FILE", help=what)
    group.add_argument(
        "--api-key",
        nargs="+",
        metavar="KEY",
        help="API keys of a single tenant, of 8 to 256 characters each, instead of --api-keys. "
        "Other users of the machine can see them in the list of processes.",
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
        help="Time within which the body or message of a request must arrive; later, the "
        "request is rejected.",
    )
    group.add_argument(
        "--max-request-kib",
        type=count(64, 8 * 2**10),
        metavar="KIB",
        help="Maximum size of the body or message of a request. (default: 1 MiB plus 8 bytes "
        "for each token of 128 prompts, but at most 4 MiB)",
    )
    group.add_argument(
        "--receive-buffer-mib",
        type=count(64, 2**20),
        default=BufferLimits().total_bytes // 2**20,
        metavar="MIB",
        help="Memory for requests that are being received. The requests of one tenant may use a "
        "quarter of it.",
    )


def _add_reader_limits(group: _Group) -> None:
    """Add how long the server waits for readers of streams, and how much it keeps for them."""
    group.add_argument(
        "--write-timeout-s",
        type=seconds(1.0, 86400.0),
        default=60.0,
        metavar="SECONDS",
        help="Time within which a client must accept a message; later, its call is aborted.",
    )
    group.add_argument(
        "--unread-output-mib",
        type=count(32, 2**20),
        default=BufferLimits().total_bytes // 2**20,
        metavar="MIB",
        help="Memory for output that clients have not read. The calls of one tenant may use a "
        "quarter of it, and a single call 1/32.",
    )
    group.add_argument(
        "--resume-grace-s",
        type=seconds(0.0, 3600.0),
        default=30.0,
        metavar="SECONDS",
        help="Time within which a client whose connection was cut may resume a resumable "
        "stream; 0 disables resumable streams.",
    )
    group.add_argument(
        "--resume-buffer-mib",
        type=count(32, 2**20),
        default=BufferLimits().total_bytes // 2**20,
        metavar="MIB",
        help="Memory for resumable streams, shared like --unread-output-mib.",
    )
    group.add_argument(
        "--stored-responses",
        type=count(0, 10**6),
        default=1000,
        metavar="N",
        help="Maximum number of /v1/responses responses that are stored per tenant for "
        "previous_response_id; the oldest are deleted first, and 0 stores none.",
    )
    group.add_argument(
        "--stored-responses-mib",
        type=count(32, 2**20),
        default=BufferLimits().total_bytes // 2**20,
        metavar="MIB",
        help="Memory for stored responses, shared like --unread-output-mib.",
    )
    group.add_argument(
        "--resume-anonymous",
        action="store_true",
        help="Without --api-keys, resume streams by their ids alone, also over gRPC; anyone who "
        "knows the id of a stream can then read it.",
    )


def _add_model_names(group: _Group) -> None:
    """Add how clients call the model, and how the model writes tool calls and reasoning."""
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="Names of the model in the API; responses contain the first one. (default: the "
        "name of the folder, or the Hub id)",
    )
    group.add_argument(
        "--tool-call-format",
        "--tool-call-parser",
        choices=TOOL_CALL_FORMATS,
        help="Format of the model's tool calls. (default: detected from the chat template)",
    )
    group.add_argument(
        "--reasoning-format",
        "--reasoning-parser",
        choices=REASONING_FORMATS,
        help="Format of the model's reasoning. (default: detected from the chat template)",
    )


def _add_logging(group: _Group) -> None:
    group.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="Format of log lines."
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning"),
        default="info",
        help="Minimum log level; warning omits the line that is logged for each call.",
    )
    group.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="URL of the OpenTelemetry collector that traces are sent to. (default: "
        "OTEL_EXPORTER_OTLP_ENDPOINT, or none)",
    )
