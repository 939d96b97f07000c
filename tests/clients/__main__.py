"""Run programs of other projects, unmodified, against a server of the shipped model.

    python -m tests.clients [NAME ...]

Each program has an environment of its own in build/clients, which is made the first time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.clients.catalog import PROGRAMS, Program
from tests.small_models.scripted_model import write_scripted_model
from tests.system.server_process import ROOT, ServerProcess

_PROGRAMS = Path(__file__).parent / "programs"
_ENVIRONMENTS = ROOT / "build" / "clients"
_TIMEOUT_S = 600.0
_FLAGS = ("--executor=local", "--dtype=float32", "--log-level=warning")
_SCRIPTED_BLOCKS = 8192
"""Agents send long prompts."""


def main(names: list[str]) -> int:
    """Run programs, all by default; return 1 if any fails."""
    chosen = [one for one in PROGRAMS if not names or one.name in names]
    pythons = {one.name: environment(one) for one in chosen}
    with ServerProcess(_FLAGS) as server:
        works = {
            one.name: _works(one, pythons[one.name], server) for one in chosen if not one.turns
        }
    works |= {one.name: _works_scripted(one, pythons[one.name]) for one in chosen if one.turns}
    failed = [name for name, is_working in works.items() if not is_working]
    print(f"{len(chosen) - len(failed)} of {len(chosen)} programs work.")
    if failed:
        print(f"Failed: {', '.join(failed)}.", file=sys.stderr)
    return 1 if failed else 0


def _works_scripted(program: Program, python: Path) -> bool:
    """Return whether a program works with a server of a model that says its turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "scripted"
        folder.mkdir()
        write_scripted_model(folder, program.turns)
        flags = (*_FLAGS, f"--num-blocks={_SCRIPTED_BLOCKS}", *program.flags)
        with ServerProcess(flags, folder) as server:
            return _works(program, python, server)


def _works(program: Program, python: Path, server: ServerProcess) -> bool:
    script = _PROGRAMS / f"{program.name}.py"
    command = [str(python), str(script), server.url, str(server.folder)]
    done = subprocess.run(
        command, timeout=_TIMEOUT_S, check=False, cwd=_ENVIRONMENTS, env=_environ()
    )
    print(f"{program.name}: {'works' if done.returncode == 0 else 'fails'}", flush=True)
    return done.returncode == 0


def environment(program: Program) -> Path:
    """Return the interpreter of a program's environment, which is made if it is missing."""
    folder = _ENVIRONMENTS / program.name
    python, stamp = folder / "bin" / "python", folder / "installed"
    wanted = "\n".join((*program.packages, *program.without_needs, *program.node_packages))
    if not stamp.is_file() or stamp.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        if program.packages:
            subprocess.run([*install, *program.packages], check=True, env=_environ())
        if program.without_needs:
            command = [*install, "--no-deps", *program.without_needs]
            subprocess.run(command, check=True, env=_environ())
        if program.node_packages:
            command = ["npm", "install", "--silent", "--prefix", str(folder)]
            subprocess.run([*command, *program.node_packages], check=True, env=_environ())
        stamp.write_text(wanted)
    return python


def _environ() -> dict[str, str]:
    # Otherwise an environment could have modules of the checkout.
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _names() -> list[str]:
    """Return the programs that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = sorted(one.name for one in PROGRAMS)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="default: all; " + ", ".join(names)
    )
    chosen: list[str] = parser.parse_args().names
    unknown = sorted(set(chosen) - set(names))
    if unknown:
        parser.error(f"unknown program {', '.join(unknown)}; choose from {', '.join(names)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main(_names()))
