"""The parser of the command `pagedray`: its commands and the flags of each."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli.bench.engine_flags import add_latency_flags, add_throughput_flags
from cluster.cli.bench.flags import add_bench_flags
from cluster.cli.deploy.flags import (
    add_check_flags,
    add_fetch_flags,
    add_hold_flags,
    add_status_flags,
)
from cluster.cli.flags.client_flags import add_client_flags
from cluster.cli.flags.engine_flags import add_engine_flags
from cluster.cli.flags.flag import group_of
from cluster.cli.flags.flag_values import seconds
from cluster.cli.flags.sampling_flags import add_sampling_flags
from cluster.cli.flags.serve_flags import add_model_names, add_serve_flags
from cluster.cli.flags.vllm_flags import add_vllm_flags
from cluster.cli.one_line_parser import MODEL_FLAG, OneLineParser
from cluster.cli.simulate.flags import add_simulate_flags
from pagedray.version import __version__

__all__ = ["make_parser"]

if TYPE_CHECKING:
    from collections.abc import Sequence

    _Commands = argparse._SubParsersAction[OneLineParser]


def make_parser() -> argparse.ArgumentParser:
    """Return a parser that names the command in `command`."""
    parser = OneLineParser(
        prog="pagedray",
        description="Serve large language models on Ray with a paged KV cache.",
        epilog="Run `pagedray COMMAND --help` for the flags of a command.",
    )
    parser.add_argument("--version", action="version", version=f"pagedray {__version__}")
    commands = parser.add_subparsers(
        title="commands",
        dest="command",
        required=True,
        metavar="COMMAND",
        parser_class=OneLineParser,
    )
    _add_serve(commands)
    _add_generate(commands)
    _add_chat(commands)
    _add_run_batch(commands)
    _add_keys(commands)
    _add_top(commands)
    _add_bench(commands)
    _add_simulate(commands)
    _add_deploy(commands)
    _add_collect_env(commands)
    _add_completion(commands)
    return parser


def _add_serve(commands: _Commands) -> None:
    what = "Start a server with an OpenAI-compatible HTTP API and gRPC."
    serve = _model_command(commands, "serve", what)
    serve.epilog = "The flags of vllm serve are accepted, too; docs/compatibility.md has more."
    add_engine_flags(serve, executor="ray")
    add_serve_flags(serve)
    add_vllm_flags(serve)
    version = f"pagedray {__version__}"
    serve.add_argument("--version", action="version", version=version, help=argparse.SUPPRESS)


def _add_generate(commands: _Commands) -> None:
    generate = _model_command(
        commands,
        "generate",
        "Generate a completion for one prompt, with a running server or a model that is loaded.",
        "[MODEL] TEXT",
        aliases=["complete"],
    )
    generate.add_argument("text", nargs="?", metavar="TEXT", help="The prompt.")
    generate.add_argument("--quick", help=argparse.SUPPRESS)
    generate.add_argument(
        "--json", action="store_true", help="Print the result as one JSON object."
    )
    _add_server(generate)
    add_sampling_flags(generate, max_tokens=64)
    add_engine_flags(generate, executor=None)
    add_vllm_flags(generate)


def _add_chat(commands: _Commands) -> None:
    chat = _model_command(
        commands,
        "chat",
        "Chat in the terminal, with a running server or a model that is loaded.",
        "[MODEL]",
    )
    chat.add_argument(
        "--system-prompt", metavar="TEXT", help="System message that conversations begin with."
    )
    chat.add_argument("--quick", metavar="TEXT", help="Answer only this message, and exit.")
    _add_server(chat)
    add_sampling_flags(chat, max_tokens=256)
    add_engine_flags(chat, executor=None)
    add_vllm_flags(chat)


def _add_run_batch(commands: _Commands) -> None:
    what = "Answer the requests of a file in OpenAI's batch format, without a server."
    batch = _model_command(commands, "run-batch", what, "MODEL -i FILE -o FILE")
    for flags, whose in (
        (("-i", "--input-file"), "Requests in JSON lines, each with custom_id, url and body."),
        (("-o", "--output-file"), "Where the results are written, in the order of the requests."),
    ):
        batch.add_argument(*flags, type=Path, required=True, metavar="FILE", help=whose)
    add_model_names(group_of(batch, "model"))
    add_engine_flags(batch, executor=None)
    add_vllm_flags(batch)


def _add_server(parser: argparse.ArgumentParser) -> None:
    """Add which running server generates the text."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url",
        metavar="URL",
        help="URL of a running server, PagedRay's or another one with an OpenAI-compatible API, in "
        "which case MODEL is a name that it serves. (default: http://127.0.0.1:8000 if there is "
        "no MODEL)",
    )
    add_client_flags(group, variables="PAGEDRAY_API_KEY")
    # vLLM's flags, of which --api-key shows the key to other users of the machine.
    for flag in ("--model-name", "--api-key"):
        group.add_argument(flag, help=argparse.SUPPRESS)


def _add_keys(commands: _Commands) -> None:
    what = "Create API keys for `pagedray serve --api-keys`."
    keys = commands.add_parser("keys", help=what, description=what)
    verbs = keys.add_subparsers(required=True, metavar="new", parser_class=OneLineParser)
    what = "Print a new API key and its entry for the key file."
    new = verbs.add_parser("new", help=what, description=what)
    new.add_argument(
        "--tenant", required=True, metavar="NAME", help="Tenant that the key belongs to."
    )


def _add_top(commands: _Commands) -> None:
    what = "Show the load of a running server, continuously updated."
    top = commands.add_parser("top", help=what, description=what)
    named = top.add_mutually_exclusive_group()
    what = "URL of the HTTP port, or HOST:PORT."
    named.add_argument("url", nargs="?", metavar="URL", default="http://127.0.0.1:8000", help=what)
    named.add_argument(
        "--url", dest="named_url", metavar="URL", help="The same as the positional URL."
    )
    add_client_flags(top, variables="PAGEDRAY_API_KEY")
    top.add_argument(
        "--every-s",
        type=seconds(0.1, 60.0),
        default=1.0,
        metavar="SECONDS",
        help="Refresh interval, from 0.1 to 60 seconds.",
    )
    top.add_argument("--once", action="store_true", help="Print the load once and exit.")


def _add_bench(commands: _Commands) -> None:
    what = "Benchmark a running server, or an engine without a server."
    bench = commands.add_parser("bench", help=what, description=what)
    verbs = bench.add_subparsers(
        dest="verb", required=True, metavar="VERB", parser_class=OneLineParser
    )
    what = "Measure the latency of one batch, which is generated repeatedly."
    latency = _model_command(verbs, "latency", what, command="bench latency")
    add_latency_flags(latency)
    add_engine_flags(latency, executor=None)
    add_vllm_flags(latency)
    what = "Measure the throughput of many requests that are submitted at once."
    throughput = _model_command(verbs, "throughput", what, command="bench throughput")
    add_throughput_flags(throughput)
    add_engine_flags(throughput, executor=None)
    add_vllm_flags(throughput)
    what = (
        "Measure latency and throughput of an OpenAI-compatible server, or of PagedRay over gRPC."
    )
    serve = verbs.add_parser(
        "serve", help=what, description=what, usage="pagedray bench serve [flags]"
    )
    add_bench_flags(serve)


def _add_simulate(commands: _Commands) -> None:
    what = "Predict throughput, latencies and memory use of replicas under a load without a GPU."
    usage = "pagedray simulate [flags]"
    add_simulate_flags(commands.add_parser("simulate", help=what, description=what, usage=usage))


def _add_deploy(commands: _Commands) -> None:
    what = "Check a deployment on Kubernetes, show its status, or download its model."
    deploy = commands.add_parser("deploy", help=what, description=what)
    verbs = deploy.add_subparsers(
        dest="verb", required=True, metavar="VERB", parser_class=OneLineParser
    )
    what = "Check Helm values for errors, without a cluster."
    add_check_flags(verbs.add_parser("check", help=what, description=what))
    what = "Explain what a deployment is waiting for; exit with status 0 if it serves requests."
    add_status_flags(verbs.add_parser("status", help=what, description=what))
    what = "Download a model from the Hub or S3, or wait until it is downloaded."
    add_fetch_flags(verbs.add_parser("fetch", help=what, description=what))
    what = (
        "Delay the shutdown of a Ray cluster's head until the workers that shut down with it have "
        "drained."
    )
    add_hold_flags(verbs.add_parser("hold", help=what, description=what))


def _add_collect_env(commands: _Commands) -> None:
    what = "Print versions, hardware and settings for a bug report, without keys and tokens."
    collect = commands.add_parser("collect-env", help=what, description=what)
    collect.add_argument(
        "--url",
        metavar="URL",
        default="http://127.0.0.1:8000",
        help="Running server to print the options of.",
    )
    add_client_flags(collect, variables="PAGEDRAY_API_KEY")


def _add_completion(commands: _Commands) -> None:
    what = "Print a shell script that completes commands and flags."
    completion = commands.add_parser("completion", help=what, description=what)
    completion.add_argument(
        "shell", choices=("bash", "tcsh", "zsh"), help="Shell to print the script for."
    )


def _model_command(
    commands: _Commands,
    name: str,
    what: str,
    operands: str = "MODEL",
    *,
    command: str | None = None,
    aliases: Sequence[str] = (),
) -> OneLineParser:
    """Add a command that takes a model; `command` is its name with that of a command above it."""
    usage = f"pagedray {command or name} {operands} [flags]"
    parser = commands.add_parser(name, help=what, description=what, usage=usage, aliases=aliases)
    parser.add_argument(
        "model",
        nargs="?" if operands.startswith("[") else None,
        metavar="MODEL",
        help="Folder of a Hugging Face checkpoint, or the id of a model on the Hub: ORG/NAME or "
        "ORG/NAME@REVISION.",
    )
    parser.add_argument(MODEL_FLAG, dest=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser
