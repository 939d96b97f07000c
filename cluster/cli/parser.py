"""The parser of the command `pagedray`: its commands and the flags of each."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cluster.cli.bench.flags import add_bench_flags, add_latency_flags, add_throughput_flags
from cluster.cli.client_flags import add_client_flags, add_sampling_flags
from cluster.cli.engine_flags import add_engine_flags, add_vllm_flags
from cluster.cli.flag import group_of, read_value, seconds
from cluster.cli.serve_flags import add_model_names, add_serve_flags
from cluster.cli.simulate_flags import add_simulate_flags
from cluster.engine.vllm_options import SPECULATION_HINT
from pagedray.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    _Commands = argparse._SubParsersAction["OneLineParser"]

__all__ = ["MODEL_FLAG", "USAGE_EXIT", "OneLineParser", "command_parser", "make_parser", "operands"]

USAGE_EXIT = 2
MODEL_FLAG = "--model"
_MAX_LIKELY = 3
_FIELD = re.compile(r"(--?[A-Za-z][\w-]*)\.([\w.-]+\+?)(?:=(.*))?", re.DOTALL)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of a flag unless it is None or a switch, and no long names of vLLM's."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        first, *others = action.option_strings or ("",)
        if not first:
            return super()._format_action_invocation(action)
        shown = ", ".join((first, *(one for one in others if first[:2] != "--" or one[:2] != "--")))
        if action.nargs == 0:
            return shown
        return f"{shown} {self._format_args(action, action.dest.upper())}"

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or isinstance(action.default, bool):
            return action.help
        return super()._get_help_string(action)


class OneLineParser(argparse.ArgumentParser):
    """A parser with error messages in one line.

    As in vLLM, flags may be written with `_` for `-`, a flag of a JSON object field by field
    (`--flag.key VALUE`), and MODEL as `--model`. Flags are not abbreviated: a flag that is added
    later would make an abbreviation mean something else.
    """

    # Any: argparse's own arguments, here and below.
    def __init__(self, **arguments: Any) -> None:
        super().__init__(formatter_class=_HelpFormatter, allow_abbrev=False, **arguments)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the arguments; an error about an unknown flag names a similar flag."""
        words = [*_with_dashes(sys.argv[1:] if args is None else args)]
        parser: argparse.ArgumentParser = self
        num_commands = 0
        for word in words:
            command = command_parser(parser, word)
            num_commands += command is not parser
            parser = command
        given = _with_objects(words[num_commands:], parser)
        given = _with_model(given, parser)
        parsed, unknown = self.parse_known_args([*words[:num_commands], *given], namespace)
        if unknown:
            word = next((one for one in unknown if one.startswith("-")), unknown[0])
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(word, parser)}")
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the arguments and the unknown arguments.

        Without any, print the help if it lists commands to choose from.
        """
        words = sys.argv[1:] if args is None else args
        if not words and any(one.choices for one in self._get_positional_actions()):
            self.print_help()
            self.exit()
        parsed, unknown = super().parse_known_args(words, namespace)
        # argparse takes an optional operand to be missing if a flag precedes it and follows another
        # operand.
        for action in self._get_positional_actions():
            is_missing = action.nargs == "?" and getattr(parsed, action.dest) is None
            if is_missing and unknown and not unknown[0].startswith("-"):
                setattr(parsed, action.dest, unknown.pop(0))
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self.error(_unknown_command(value, [*action.choices], self.prog))
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        # Messages of argparse have no full stop.
        what = message.removesuffix(".")
        self.exit(USAGE_EXIT, f"{self.prog}: error: {what} (see {self.prog} --help)\n")


def _unknown_command(word: str, commands: Sequence[str], program: str) -> str:
    """Return the error of a word that is not a command, with the command that it is like."""
    what = f"{word:.80} is not a command"
    likely = [one for one in commands if one.startswith(word) or word.startswith(one)]
    likely = likely or difflib.get_close_matches(word, commands, n=1, cutoff=0.6)
    if likely:
        return f"{what}; did you mean {' or '.join(likely[:_MAX_LIKELY])}?"
    if "/" in word and "serve" in commands:
        return f"{what}; did you mean {program} serve {word:.80}?"
    return f"{what}; choose from {', '.join(commands)}"


def operands(words: Sequence[str], options: Mapping[str, argparse.Action]) -> list[str]:
    """Return the words of a command that are neither flags nor values of flags."""
    found: list[str] = []
    num_values = 0.0
    for word in words:
        if word.startswith("-"):
            action = options.get(_dashed_flag(word.partition("=")[0]))
            takes_one = action is not None and action.nargs in (None, "?") and "=" not in word
            takes_all = action is not None and action.nargs in ("+", "*") and "=" not in word
            num_values = float("inf") if takes_all else takes_one
        elif num_values < 1.0:
            found.append(word)
        else:
            num_values -= 1.0
    return found


def _dashed_flag(word: str) -> str:
    """Return a word, with dashes in the name if it is a flag."""
    name, *value = word.split("=", 1)
    flag, *keys = name.split(".", 1)
    dashed = ".".join((flag.replace("_", "-"), *keys))
    return "=".join((dashed, *value)) if word.startswith("--") else word


def _with_dashes(words: Sequence[str]) -> Iterator[str]:
    is_flag_allowed = True
    for word in words:
        # Words after a `--` are not flags.
        is_flag_allowed = is_flag_allowed and word != "--"
        yield _dashed_flag(word) if is_flag_allowed else word


def _with_model(words: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the words with MODEL as the first operand, if it is given as `--model`."""
    options = parser._option_string_actions
    num_operands = sum(not action.option_strings for action in parser._actions)
    if MODEL_FLAG not in options or options[MODEL_FLAG].help != argparse.SUPPRESS:
        return words
    rest: list[str] = []
    model: str | None = None
    remaining = iter(words)
    for word in remaining:
        name, is_joined, value = word.partition("=")
        if name == MODEL_FLAG:
            model = value if is_joined else next(remaining, None)
            if not model:
                parser.error(f"{MODEL_FLAG} requires a folder or a Hub id")
        else:
            rest.append(word)
    found = operands(rest, options)
    if model is None or model in found:
        return rest
    if len(found) >= num_operands:
        parser.error(f"the model is given twice: {found[0]} and {MODEL_FLAG} {model}")
    return [model, *rest]


def _with_objects(words: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the words, with flags such as `--config.key VALUE` merged to JSON objects."""
    options = parser._option_string_actions
    bases = {found[1] for word in words if (found := _FIELD.fullmatch(word))} & options.keys()
    objects: dict[str, dict[str, Any]] = {}  # Any: JSON
    rest: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, is_joined, value = word.partition("=")
        field = _FIELD.fullmatch(word)
        flag = field[1] if field else name
        if flag not in bases:
            rest.append(word)
            continue
        text = value if is_joined else next(remaining, "")
        whole = objects.setdefault(flag, {})
        if field is not None:
            _set_field(whole, field[2], read_value(text))
        elif isinstance(one := read_value(text), dict):
            whole |= one
        else:
            parser.error(f"{flag} must be a JSON object, because {flag}. fields are given, too")
    return [*rest, *(f"{flag}={json.dumps(whole)}" for flag, whole in objects.items())]


def _set_field(whole: dict[str, Any], path: str, value: object) -> None:  # Any: JSON
    """Set a field of an object, such as `a.b`; `a.b+` appends to a list."""
    *above, last = path.split(".")
    for key in above:
        inner = whole.setdefault(key, {})
        if not isinstance(inner, dict):
            inner = whole[key] = {}
        whole = inner
    if last.endswith("+"):
        whole.setdefault(last[:-1], []).append(value)
    else:
        whole[last] = value


def _hint(word: str, parser: argparse.ArgumentParser) -> str:
    """Return which flags a word abbreviates or is like, to be added to an error."""
    name = word.partition("=")[0]
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    if name.startswith("--speculative-") and "--speculative-config" in flags:
        return f"; {SPECULATION_HINT.replace('speculative_config', '--speculative-config')}"
    begun = [
        flag
        for flag in flags
        if flag.startswith(name)
        and len(name) > 2
        and parser._option_string_actions[flag].help != argparse.SUPPRESS
        and parser._option_string_actions[flag].option_strings[0] == flag
    ]
    likely = begun[:_MAX_LIKELY] or difflib.get_close_matches(name, flags, n=1, cutoff=0.75)
    return f"; did you mean {' or '.join(likely)}?" if likely else ""


def command_parser(parser: argparse.ArgumentParser, command: str) -> argparse.ArgumentParser:
    """Return the parser of a command, or `parser` if there is no such command."""
    for action in parser._actions:
        if isinstance(action.choices, dict) and command in action.choices:
            found: argparse.ArgumentParser = action.choices[command]
            return found
    return parser


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
        help="URL of a running server of PagedRay, or of another with an OpenAI-compatible API, in "
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
    what = "Check a deployment on Kubernetes, or download its model."
    deploy = commands.add_parser("deploy", help=what, description=what)
    verbs = deploy.add_subparsers(
        dest="verb", required=True, metavar="VERB", parser_class=OneLineParser
    )
    what = "Check Helm values for errors that Helm does not find, without a cluster."
    check = verbs.add_parser("check", help=what, description=what)
    check.add_argument(
        "values",
        type=Path,
        nargs="+",
        metavar="VALUES",
        help="Files of Helm values; later files override earlier files.",
    )
    check.add_argument(
        "--chart",
        type=Path,
        default=Path("deploy/helm/pagedray"),
        metavar="FOLDER",
        help="Folder of PagedRay's Helm chart.",
    )
    what = "Download a model from the Hub or S3, or wait until it is downloaded."
    fetch = verbs.add_parser("fetch", help=what, description=what)
    fetch.add_argument(
        "model",
        metavar="MODEL",
        help="Hub id, ORG/NAME or ORG/NAME@REVISION, or s3://BUCKET/PREFIX.",
    )
    fetch.add_argument(
        "--folder", type=Path, metavar="FOLDER", help="Folder to download a model from S3 into."
    )
    fetch.add_argument(
        "--wait",
        action="store_true",
        help="Do not download; wait until another process has downloaded the last file.",
    )
    what = (
        "Delay the shutdown of a Ray cluster's head until the workers that shut down with it have "
        "drained."
    )
    hold = verbs.add_parser("hold", help=what, description=what)
    hold.add_argument(
        "--address", default="127.0.0.1:6379", metavar="ADDRESS", help="Address of Ray's GCS."
    )
    hold.add_argument(
        "--limit-s",
        type=seconds(0, 86400),
        default=150.0,
        metavar="SECONDS",
        help="Maximum time to wait.",
    )


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
        help="Folder of a Hugging Face checkpoint, a GGUF file, or the id of a model on the Hub: "
        "ORG/NAME, ORG/NAME@REVISION or, for a GGUF file, ORG/NAME:QUANT.",
    )
    parser.add_argument(MODEL_FLAG, dest=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser
