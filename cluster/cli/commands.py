"""The command `pagedray`: each subcommand imports the code that it runs."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli.client_flags import sampling_fields
from cluster.cli.engine_flags import engine_options, ignored_flags, log_ignored_flags
from cluster.cli.parser import USAGE_EXIT, command_parser, make_parser
from cluster.cli.process import discard_output, exiting_at_interrupt, has_lost_reader, is_disk_full
from cluster.cli.serve_flags import CONFIG_FLAG, DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT
from cluster.engine.engine_options import EngineOptions, engine_config
from cluster.engine.progress import progress_reports
from pagedray.errors import InvalidRequestError, PagedRayError, StartupError
from pagedray.machine import raise_descriptor_limit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cluster.cli.server_connection import RemoteModel
    from cluster.cli.terminal import LocalModel
    from cluster.serving.frontend_options import FrontendOptions
    from pagedray.config import EngineConfig

__all__ = ["main", "set_ports"]

_FAILURE_EXIT = 1
_FOLDERS = frozenset(("FOLDER", "MODEL"))
"""Metavars of flags that take a folder."""
_RAY_DEATHS = "^(A worker died or was killed while executing a task|Raylet is terminated)"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    words = sys.argv[1:] if arguments is None else arguments
    try:
        parsed = parser.parse_args(_with_config(parser, words))
    except StartupError as error:
        command_parser(parser, words[0]).error(str(error))
    if parsed.command != "serve":
        for line in ignored_flags(parsed).values():
            print(f"pagedray: {line}", file=sys.stderr)
    # The engine logs the death of a rank or a raylet in one line; Ray's paragraph of guesses, and
    # the end of the raylet's log, are filtered out.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _RAY_DEATHS)
    # A thread that still calls Ray after its end would start another cluster.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    try:
        code = _COMMANDS[parsed.command](parsed)
        print(end="", flush=True)
    except BrokenPipeError:
        if not has_lost_reader():
            raise
        discard_output()
        return _FAILURE_EXIT
    except OSError as error:
        if not is_disk_full(error):
            raise
        discard_output()
        print(f"pagedray: error: Cannot write: {error.strerror}.", file=sys.stderr)
        return _FAILURE_EXIT
    except PagedRayError as error:
        print(f"pagedray: error: {error}", file=sys.stderr)
        is_mistake = isinstance(error, StartupError | InvalidRequestError)
        return USAGE_EXIT if is_mistake else _FAILURE_EXIT
    return code


def _with_config(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments to parse; a file of flags changes the defaults of the parser."""
    if not any(one.partition("=")[0] == CONFIG_FLAG for one in arguments):
        return arguments
    # YAML is only loaded if it is used.
    from cluster.cli.config_file import apply_config

    command, *others = arguments
    return [command, *apply_config(command_parser(parser, command), others)]


# Each command imports its code when it runs, so that --help is quick.


def _config(parsed: argparse.Namespace) -> EngineConfig:
    with progress_reports(are_shown=True) as report:
        return engine_config(parsed.model, engine_options(parsed), report)


def _serve(parsed: argparse.Namespace) -> int:
    # Ray forks its daemons while the gRPC server is running, and a child may hang in the handlers
    # of gRPC before it runs the daemon. Nothing that is forked here uses gRPC.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    # gRPC's core logs a line for many kinds of malformed calls, so that any client could fill the
    # log. Errors of the server itself are exceptions.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from cluster.serving.inputs import with_served_names
    from cluster.serving.telemetry.log_lines import logging_to

    # Importing the server takes seconds on a slow disk, so mistakes are found before.
    with logging_to(form=parsed.log_format, level=parsed.log_level):
        log_ignored_flags(parsed)
        config = with_served_names(_config(parsed), parsed.served_model_name or ())
        set_ports(parsed)
        with exiting_at_interrupt():
            from cluster.cli.server import Server
            from cluster.serving.auth import Authenticator
            from cluster.serving.telemetry.tracing import otlp_tracer
            from cluster.serving.tls import certificate_store

        # Before anything is started that inherits it.
        raise_descriptor_limit()
        server = Server(
            config,
            _frontend_options(parsed),
            authenticator=Authenticator(parsed.api_keys, keys=parsed.api_key or ()),
            certificates=certificate_store(parsed.tls_cert, parsed.tls_key, parsed.tls_client_ca),
            tracer=otlp_tracer(parsed.otlp_endpoint),
            drain_s=parsed.drain_s,
        )
        code = server.serve_until_stopped()
    if server.has_lost_ray:
        # Ray's exit handlers would wait for the processes that have ended.
        os._exit(code)
    return code


def set_ports(parsed: argparse.Namespace) -> None:
    """Choose the port of gRPC if it is not given. Raises DeviceError for a port in use."""
    from cluster.serving.listener import check_ports, free_port

    if parsed.grpc_port is None:
        parsed.grpc_port = DEFAULT_GRPC_PORT
        # A second server on this machine, or a user who only knows HTTP.
        if parsed.http_port != DEFAULT_HTTP_PORT:
            parsed.grpc_port = free_port(
                "gRPC", parsed.host, DEFAULT_GRPC_PORT, other=parsed.http_port
            )
    check_ports(parsed.host, {"gRPC": parsed.grpc_port, "HTTP": parsed.http_port})


def _frontend_options(parsed: argparse.Namespace) -> FrontendOptions:
    from cluster.serving.frontend_options import FrontendOptions
    from cluster.serving.http.request_checks import AllowedOrigins
    from cluster.serving.inputs import CallOptions
    from cluster.serving.intake import BufferLimits, IntakeLimits, ReaderLimits
    from cluster.serving.responses.stored_responses import StoreLimits

    def buffer(mib: int) -> BufferLimits:
        return BufferLimits(mib * 2**20)

    kib = parsed.max_request_kib
    calls = CallOptions(
        tool_format=parsed.tool_call_format,
        reasoning_format=parsed.reasoning_format,
        reader_limits=ReaderLimits(
            write_timeout_s=parsed.write_timeout_s,
            unread_buffer=buffer(parsed.unread_output_mib),
            resume_grace_s=parsed.resume_grace_s or None,
            resumes_anonymous=parsed.resume_anonymous,
            resume_buffer=buffer(parsed.resume_buffer_mib),
        ),
        intake_limits=IntakeLimits(
            read_timeout_s=parsed.read_timeout_s,
            received=buffer(parsed.receive_buffer_mib),
            request_bytes=None if kib is None else kib * 2**10,
        ),
        strict_parameters=parsed.strict_parameters,
    )
    return FrontendOptions(
        host=parsed.host,
        grpc_port=parsed.grpc_port,
        http_port=parsed.http_port,
        calls=calls,
        allowed_hosts=tuple(parsed.allowed_hosts or ()),
        allowed_origins=AllowedOrigins(parsed.allowed_origins or ()),
        store_limits=StoreLimits(parsed.stored_responses, buffer(parsed.stored_responses_mib)),
    )


def _generate(parsed: argparse.Namespace) -> int:
    from cluster.cli.terminal import generate

    if parsed.text is None:
        parsed.text = parsed.quick
    if parsed.text is None:
        # A single operand is the text.
        parsed.model, parsed.text = None, parsed.model
    if parsed.text is None:
        raise StartupError("A prompt is required: pagedray generate [MODEL] TEXT.")
    with closing(_text_model(parsed)) as model:
        return generate(model, parsed.text, is_json=parsed.json)


def _chat(parsed: argparse.Namespace) -> int:
    from cluster.cli.terminal import chat

    with closing(_text_model(parsed)) as model:
        return chat(model, system_prompt=parsed.system_prompt, quick=parsed.quick)


def _run_batch(parsed: argparse.Namespace) -> int:
    from cluster.serving.inputs import with_served_names

    # The file is checked before the model is loaded.
    with exiting_at_interrupt():
        from cluster.cli.run_batch import read_batch, run_batch
        from cluster.serving.inputs import CallOptions

    lines = read_batch(parsed.input_file)
    config = with_served_names(_config(parsed), parsed.served_model_name or ())
    options = CallOptions(
        tool_format=parsed.tool_call_format, reasoning_format=parsed.reasoning_format
    )
    return run_batch(config, options, lines, parsed.output_file)


def _text_model(parsed: argparse.Namespace) -> LocalModel | RemoteModel:
    """Return a model of a server if there is a URL or no model to load. Raises PagedRayError."""
    given, options = sampling_fields(parsed), engine_options(parsed)
    if parsed.url is None and parsed.model is not None:
        from cluster.cli.terminal import LocalModel

        return LocalModel(parsed.model, options, given)
    from cluster.cli.client_flags import read_key
    from cluster.cli.server_connection import RemoteModel

    for name, value in asdict(replace(options, executor="ray")).items():
        if value != getattr(EngineOptions(), name):
            raise StartupError(
                f"{name} cannot be set for a running server; it is an option of `pagedray serve`."
            )
    key = parsed.api_key or read_key(parsed.api_key_file)
    name = parsed.model or parsed.model_name
    return RemoteModel(parsed.url, name, given, key=key, ca_file=parsed.tls_ca)


def _new_key(parsed: argparse.Namespace) -> int:
    from cluster.serving.auth import check_tenant_name, digest_of, new_key

    check_tenant_name(parsed.tenant)
    key = new_key()
    print(f"API key for {parsed.tenant}; it is not shown again:\n\n    {key}\n")
    print("Add this to the file given to --api-keys:\n")
    print(f'[tenants."{parsed.tenant}"]\nkeys = ["sha256:{digest_of(key).hex()}"]')
    return 0


def _top(parsed: argparse.Namespace) -> int:
    from cluster.cli.client_flags import read_key
    from cluster.cli.top import top

    return top(
        parsed.named_url or parsed.url,
        key=read_key(parsed.api_key_file),
        ca_file=parsed.tls_ca,
        every_s=parsed.every_s,
        is_once=parsed.once,
    )


def _bench(parsed: argparse.Namespace) -> int:
    if parsed.verb == "serve":
        from cluster.cli.bench.command import bench_serve

        return bench_serve(parsed)
    from cluster.cli.bench.engine_command import bench_latency, bench_throughput

    run = bench_latency if parsed.verb == "latency" else bench_throughput
    return run(parsed, engine_options(parsed))


def _simulate(parsed: argparse.Namespace) -> int:
    from cluster.cli.simulate import simulate

    return simulate(parsed)


def _deploy(parsed: argparse.Namespace) -> int:
    if parsed.verb == "hold":
        from cluster.cli.deploy_hold import hold

        return hold(parsed.address, limit_s=parsed.limit_s)
    from cluster.cli.deploy import check, fetch_command

    if parsed.verb == "check":
        return check(parsed.values, chart=parsed.chart)
    return fetch_command(parsed.model, folder=parsed.folder, is_waiting=parsed.wait)


def _collect_env(parsed: argparse.Namespace) -> int:
    from cluster.cli.client_flags import read_key
    from cluster.cli.environment import print_environment

    return print_environment(parsed.url, key=read_key(parsed.api_key_file), ca_file=parsed.tls_ca)


def _completion(parsed: argparse.Namespace) -> int:
    print(_completion_script(make_parser(), parsed.shell))
    return 0


def _completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script of a shell: bash, tcsh or zsh."""
    import shtab

    for action in _actions(parser):
        # A shell completes nothing by itself once it has a script for a command.
        if action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]  # what shtab reads
        elif action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # what shtab reads
    return str(shtab.complete(parser, shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the actions of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)


_COMMANDS = {
    "serve": _serve,
    "generate": _generate,
    "complete": _generate,
    "chat": _chat,
    "run-batch": _run_batch,
    "keys": _new_key,
    "top": _top,
    "bench": _bench,
    "simulate": _simulate,
    "deploy": _deploy,
    "collect-env": _collect_env,
    "completion": _completion,
}
