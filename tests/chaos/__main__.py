"""Faults under load, and whether every accepted request ended rightly: `python -m tests.chaos`.

Starts a server, runs requests on it undisturbed, then streams them from many clients while faults
are injected. Everything that clients see is written to a history, which is then checked: each
accepted request ends once, with the undisturbed text, and the server holds nothing afterwards.
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

from pagedray.machine import raise_descriptor_limit
from tests.chaos.checker import Verdict, check
from tests.chaos.events import History, read_history
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.run import Run, RunOptions, applicable, write_keys
from tests.chaos.targets import ServerTarget, SmallDisk, Target
from tests.load.report import run_environment
from tests.process_ends import still_running
from tests.system.server_process import TINY_LLAMA

_NUM_SHOWN = 40
_DRAIN_S = 120
_NUM_DESCRIPTORS = 1024
"""Of a server whose descriptors a fault takes: enough for the clients that are checked."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, check and report; return 1 if the history breaks a rule."""
    options = make_parser().parse_args(arguments)
    if options.check is not None:
        return _report(check(read_history(options.check)), options.output, options.check)
    folder = Path(options.folder or tempfile.mkdtemp(prefix="pagedray-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    history_path = folder / "history.jsonl"
    _run(options, folder, history_path)
    return _report(check(read_history(history_path)), options.output, history_path)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the program's options."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--target",
        choices=("server", "serve"),
        default="server",
        help="pagedray serve, or Ray Serve (%(default)s)",
    )
    add("--executor", choices=("ray", "local"), default="ray", help="of the server (%(default)s)")
    add("--model", type=Path, default=TINY_LLAMA, help="folder of the model (%(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="(%(default)s)")
    add("--dtype", default="float32", help="recomputed texts differ in others (%(default)s)")
    add("--tensor-parallel-size", type=int, metavar="N", help="default: 2; in a replica 1")
    add("--replicas", type=int, default=2, metavar="N", help="of Ray Serve (%(default)s)")
    add("--seconds", type=float, default=600.0, help="time with faults (%(default)s)")
    add("--every", type=float, default=20.0, help="seconds between faults (%(default)s)")
    add("--streams", type=int, default=64, help="concurrent streams (%(default)s)")
    add("--requests", type=int, default=64, help="number of different requests (%(default)s)")
    add("--max-tokens", type=int, default=400, help="maximum tokens of a request (%(default)s)")
    add("--seed", type=int, default=0, help="of requests and faults (%(default)s)")
    add(
        "--faults",
        nargs="+",
        choices=sorted(one.__name__ for one in FAULTS),
        metavar="FAULT",
        help="default: all that apply; " + ", ".join(sorted(one.__name__ for one in FAULTS)),
    )
    add("--folder", help="for the history and the server's log; default: a temporary one")
    add("--check", type=Path, metavar="HISTORY", help="check a history instead of running")
    add("--output", type=Path, metavar="FILE", help="write the figures here, as JSON")
    return parser


def _run(options: argparse.Namespace, folder: Path, history_path: Path) -> None:
    keys_path = folder / "keys.toml"
    keys = write_keys(keys_path)
    faults = _faults(options)
    with History(history_path) as history, ExitStack() as stack:
        disk = None
        if any(one.needs_disk for one in faults):
            disk = stack.enter_context(SmallDisk())
        limit = None
        if any(one.needs_descriptor_limit for one in faults):
            raise_descriptor_limit()
            limit = _NUM_DESCRIPTORS
        target = _target(options, folder, history, keys_path, disk, limit)
        print(f"History and log: {folder}", flush=True)
        print("Faults: " + "; ".join(one.name for one in faults), flush=True)
        try:
            target.start()
            run = Run(target, history, _run_options(options, faults), keys)
            asyncio.run(run.run())
            family = target.family()
        finally:
            target.stop()
        run.note_leftovers(_alive(family))


def _faults(options: argparse.Namespace) -> tuple[type[Fault], ...]:
    known = {one.__name__: one for one in FAULTS}
    chosen = [known[name] for name in options.faults] if options.faults else FAULTS
    return tuple(
        applicable(
            chosen,
            target=options.target,
            has_rank_processes=options.executor == "ray",
            can_fill_disk=SmallDisk.can_mount(),
        )
    )


def _run_options(options: argparse.Namespace, faults: tuple[type[Fault], ...]) -> RunOptions:
    return RunOptions(
        seed=options.seed,
        seconds=options.seconds,
        every_s=options.every,
        num_streams=options.streams,
        num_specs=options.requests,
        max_tokens=options.max_tokens,
        faults=faults,
        command=" ".join(["python -m tests.chaos", *sys.argv[1:]]),
    )


def _target(
    options: argparse.Namespace,
    folder: Path,
    history: History,
    keys_path: Path,
    disk: SmallDisk | None,
    descriptor_limit: int | None,
) -> Target:
    has_rank_processes = options.executor == "ray"
    size = (options.tensor_parallel_size or 2) if has_rank_processes else 1
    if options.target == "serve":
        return _serve_target(options, keys_path)
    arguments = [
        f"--device={options.device}",
        f"--dtype={options.dtype}",
        f"--executor={options.executor}",
        f"--tensor-parallel-size={size}",
        f"--api-keys={keys_path}",
        f"--drain-s={_DRAIN_S}",
    ]
    if options.device == "cpu":
        arguments += ["--num-threads=1", "--num-blocks=4096"]
    return ServerTarget(
        *arguments,
        history=history,
        log=folder / "server.log",
        num_ranks=size if has_rank_processes else 0,
        folder=options.model,
        disk=disk,
        descriptor_limit=descriptor_limit,
    )


def _serve_target(options: argparse.Namespace, keys_path: Path) -> Target:
    # Ray starts here, and reads these when it is imported.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ.update(token | {"RAY_USAGE_STATS_ENABLED": "0"})
    from tests.chaos.serve_target import ServeTarget

    size = options.tensor_parallel_size or 1
    arguments = {
        "model": str(options.model.resolve()),
        "device": options.device,
        "dtype": options.dtype,
        "executor": options.executor,
        "tensor_parallel_size": size,
        "api_keys": str(keys_path.resolve()),
    }
    # None: as many as there are.
    is_on_cpu = options.device == "cpu"
    arguments |= (
        {"num_threads": 1, "num_blocks": 4096}
        if is_on_cpu
        else dict.fromkeys(("num_threads", "num_blocks"))
    )
    has_rank_processes = options.executor == "ray"
    return ServeTarget(
        arguments,
        model=options.model.name,
        num_replicas=options.replicas,
        num_ranks=size if has_rank_processes else 0,
        num_gpus=options.replicas * size if options.device == "cuda" else 0,
    )


def _alive(processes: list[psutil.Process]) -> list[str]:
    """Return the processes that have not ended a minute after their server did."""
    return [f"{one.pid} {one.name()}" for one in still_running(processes, 60.0)]


def _report(verdict: Verdict, output: Path | None, history_path: Path) -> int:
    print(json.dumps(verdict.figures, indent=1))
    for one in verdict.violations[:_NUM_SHOWN]:
        print(f"{one.at_s:9.2f} s  {one.rule}: {one.what}")
    rules = dict(verdict.rules)
    if output is not None:
        figures = run_environment("tests.chaos") | verdict.figures | {"violations": rules}
        output.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"{history_path}: " + (f"BROKEN RULES: {rules}" if rules else "no rule is broken."))
    return 1 if rules else 0


if __name__ == "__main__":
    # As with Ctrl-C, the server is stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
