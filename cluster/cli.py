"""The command `pagedray`: serve, generate, chat."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from cluster.flags import add_engine_flags, engine_options
from cluster.options import engine_config
from pagedray import __version__
from pagedray.errors import InvalidRequestError, PagedRayError, StartupError
from pagedray.request import SamplingParams

__all__ = ["main"]

_USAGE_EXIT = 2
_FAILURE_EXIT = 1
_INTERRUPT_EXIT = 130
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
    return parser


def _add_serve(commands: _Commands) -> None:
    serve = _command(commands, "serve", "Serve a model over gRPC and HTTP until Ctrl-C.", _serve)
    group = serve.add_argument_group("fronts")
    group.add_argument("--host", default="127.0.0.1", help="address to bind (%(default)s)")
    group.add_argument("--grpc-port", type=int, default=9000, help="0 chooses one (%(default)s)")
    group.add_argument("--http-port", type=int, default=8000, help="0 chooses one (%(default)s)")
    group.add_argument(
        "--served-model-name", metavar="NAME", help="what clients call it (the folder's name)"
    )
    add_engine_flags(serve, executor="ray")


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
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("cluster").setLevel(logging.INFO)
    # Fronts and engine are loaded by the commands that need them: --help is quick.
    from cluster.server import Server

    config = engine_config(parsed.model, engine_options(parsed))
    if parsed.served_model_name:
        config = replace(config, model=replace(config.model, name=parsed.served_model_name))
    server = Server(
        config, host=parsed.host, grpc_port=parsed.grpc_port, http_port=parsed.http_port
    )
    return server.run()


def _generate(parsed: argparse.Namespace) -> int:
    from cluster.terminal import generate

    return generate(
        parsed.model, engine_options(parsed), parsed.text, _sampling(parsed), parsed.json
    )


def _chat(parsed: argparse.Namespace) -> int:
    from cluster.terminal import chat

    return chat(parsed.model, engine_options(parsed), _sampling(parsed))


def _sampling(parsed: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=parsed.max_tokens,
        temperature=parsed.temperature,
        top_p=parsed.top_p,
        top_k=parsed.top_k,
        seed=parsed.seed,
    )


if __name__ == "__main__":
    sys.exit(main())
