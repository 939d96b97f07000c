"""The command `pagedray`: serve, generate, chat, keys, top."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from cluster.cli.flags import add_engine_flags, engine_options
from cluster.engine.options import engine_config
from cluster.serving.tools.tool_calls import TOOL_CALL_FORMATS
from pagedray.errors import InvalidRequestError, PagedRayError, StartupError
from pagedray.request import SamplingParams
from pagedray.version import __version__

__all__ = ["main"]

_USAGE_EXIT = 2
_FAILURE_EXIT = 1
_INTERRUPT_EXIT = 130
_MAX_DRAIN_S = 86400.0
_MIN_PERIOD_S = 0.1
_MAX_PERIOD_S = 60.0
_RAY_DEATH = "^A worker died or was killed while executing a task"


class _OneLineParser(argparse.ArgumentParser):
    """A parser whose complaint is one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE_EXIT, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


if TYPE_CHECKING:
    from collections.abc import Sequence

    _Commands = argparse._SubParsersAction[_OneLineParser]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parsed = _parser().parse_args(arguments)
    # Ray would tell of a dead rank in a paragraph of guesses; we say it in a line.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _RAY_DEATH)
    try:
        return int(parsed.run(parsed))
    except (StartupError, InvalidRequestError) as error:
        print(f"pagedray: error: {error}", file=sys.stderr)
        return _USAGE_EXIT
    except PagedRayError as error:
        print(f"pagedray: error: {error}", file=sys.stderr)
        return _FAILURE_EXIT
    except KeyboardInterrupt:
        return _INTERRUPT_EXIT


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="pagedray",
        description="Serve large language models from Ray actors with a paged KV cache.",
    )
    parser.add_argument("--version", action="version", version=f"pagedray {__version__}")
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", parser_class=_OneLineParser
    )
    _add_serve(commands)
    _add_generate(commands)
    _add_chat(commands)
    _add_keys(commands)
    _add_top(commands)
    return parser


def _add_serve(commands: _Commands) -> None:
    serve = _command(commands, "serve", "Serve a model over gRPC and HTTP until Ctrl-C.", _serve)
    group = serve.add_argument_group("frontends")
    group.add_argument("--host", default="127.0.0.1", help="address to bind (%(default)s)")
    group.add_argument("--grpc-port", type=int, default=9000, help="0 chooses one (%(default)s)")
    group.add_argument("--http-port", type=int, default=8000, help="0 chooses one (%(default)s)")
    group.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="refuse calls without one of these keys; `pagedray keys new` makes one",
    )
    group.add_argument(
        "--tls-cert",
        type=Path,
        metavar="FILE",
        help="speak TLS with this certificate, in PEM; renewed files are taken as they come",
    )
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key, in PEM")
    group.add_argument(
        "--tls-client-ca",
        type=Path,
        metavar="FILE",
        help="turn away clients without a certificate of this authority",
    )
    group.add_argument(
        "--drain-s",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="time that SIGTERM leaves running requests (%(default)s)",
    )
    group.add_argument(
        "--served-model-name", metavar="NAME", help="what clients call it (the folder's name)"
    )
    group.add_argument(
        "--tool-call-format",
        choices=TOOL_CALL_FORMATS,
        help="how the model writes tool calls (found in its chat template)",
    )
    _add_observation(serve)
    add_engine_flags(serve, executor="ray")


def _add_observation(serve: _OneLineParser) -> None:
    group = serve.add_argument_group("log and traces")
    group.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="lines for people, or objects for programs (%(default)s)",
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning"),
        default="info",
        help="warning leaves the line of each call out (%(default)s)",
    )
    group.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send traces to this OpenTelemetry collector (OTEL_EXPORTER_OTLP_ENDPOINT, or none)",
    )


def _add_generate(commands: _Commands) -> None:
    generate = _command(commands, "generate", "Continue one text and print it.", _generate)
    generate.add_argument("text", metavar="TEXT", help="what to continue")
    generate.add_argument("--json", action="store_true", help="print one JSON object")
    _add_sampling(generate, max_tokens=64)
    add_engine_flags(generate, executor=None)


def _add_chat(commands: _Commands) -> None:
    chat = _command(commands, "chat", "Talk with a model in the terminal.", _chat)
    _add_sampling(chat, max_tokens=256)
    add_engine_flags(chat, executor=None)


def _add_keys(commands: _Commands) -> None:
    what = "Make API keys for `serve --api-keys`."
    keys = commands.add_parser("keys", help=what, description=what)
    verbs = keys.add_subparsers(required=True, metavar="new", parser_class=_OneLineParser)
    what = "Print a new key, and the lines for the file of keys."
    new = verbs.add_parser("new", help=what, description=what)
    new.add_argument("--tenant", required=True, metavar="NAME", help="whose key it is")
    new.set_defaults(run=_new_key)


def _add_top(commands: _Commands) -> None:
    what = "Show what a server does, live: requests, blocks, tokens per second."
    top = commands.add_parser("top", help=what, description=what)
    top.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the server's HTTP port (%(default)s)"
    )
    top.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="its key (the variable PAGEDRAY_API_KEY)"
    )
    top.add_argument(
        "--tls-ca", type=Path, metavar="FILE", help="whose certificates to trust (the system's)"
    )
    top.add_argument(
        "--every-s",
        type=_period,
        default=1.0,
        metavar="S",
        help="how often to look, 0.1 to 60 (%(default)s)",
    )
    top.add_argument("--once", action="store_true", help="print one picture")
    top.set_defaults(run=_top)


def _command(commands: _Commands, name: str, what: str, run: object) -> _OneLineParser:
    parser = commands.add_parser(name, help=what, description=what)
    parser.add_argument("model", metavar="MODEL", help="the folder of a checkpoint")
    parser.set_defaults(run=run)
    return parser


def _add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help="tokens to generate at most (%(default)s)",
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (%(default)s)"
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="keep the likeliest tokens of this probability (%(default)s)",
    )
    group.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="keep this many of the likeliest tokens; 0 is all (%(default)s)",
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="makes the choice of tokens repeatable (a random one)"
    )


def _serve(parsed: argparse.Namespace) -> int:
    # Ray forks its daemons beside the running gRPC server; they never use its channels.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    # Frontends and engine are loaded by the commands that need them: --help is quick.
    from cluster.cli.server import Server
    from cluster.serving.auth.authenticator import Authenticator
    from cluster.serving.telemetry.log_lines import logging_to
    from cluster.serving.telemetry.tracing import otlp_tracer
    from cluster.serving.tls import certificate_store

    config = engine_config(parsed.model, engine_options(parsed))
    if parsed.served_model_name:
        config = replace(config, model=replace(config.model, name=parsed.served_model_name))
    with logging_to(form=parsed.log_format, level=parsed.log_level):
        server = Server(
            config,
            host=parsed.host,
            grpc_port=parsed.grpc_port,
            http_port=parsed.http_port,
            authenticator=Authenticator(parsed.api_keys),
            certificates=certificate_store(parsed.tls_cert, parsed.tls_key, parsed.tls_client_ca),
            tracer=otlp_tracer(parsed.otlp_endpoint),
            tool_format=parsed.tool_call_format,
            drain_s=parsed.drain_s,
        )
        return server.serve_until_stopped()


def _generate(parsed: argparse.Namespace) -> int:
    from cluster.cli.terminal import generate

    return generate(
        parsed.model, engine_options(parsed), parsed.text, _sampling(parsed), parsed.json
    )


def _chat(parsed: argparse.Namespace) -> int:
    from cluster.cli.terminal import chat

    return chat(parsed.model, engine_options(parsed), _sampling(parsed))


def _new_key(parsed: argparse.Namespace) -> int:
    from cluster.cli.keys import print_new_key

    return print_new_key(parsed.tenant)


def _top(parsed: argparse.Namespace) -> int:
    from cluster.cli.top import read_key, top

    return top(
        parsed.url,
        key=read_key(parsed.api_key_file),
        ca_file=parsed.tls_ca,
        every_s=parsed.every_s,
        is_once=parsed.once,
    )


def _period(text: str) -> float:
    seconds = float(text)
    if not _MIN_PERIOD_S <= seconds <= _MAX_PERIOD_S:
        raise ValueError(text)
    return seconds


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.0 <= seconds <= _MAX_DRAIN_S:
        raise ValueError(text)
    return seconds


def _sampling(parsed: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=parsed.max_tokens,
        temperature=parsed.temperature,
        top_p=parsed.top_p,
        top_k=parsed.top_k,
        seed=parsed.seed,
    )
