"""Run programs of other projects, unmodified, against a server of the shipped model.

    python -m tests.clients [NAME ...]

Each program has an environment of its own in build/clients, which is made the first time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

from tests.clients.catalog import PROGRAMS, Program
from tests.system.server_process import ROOT, TINY_LLAMA, ServerProcess

_PROGRAMS = Path(__file__).parent / "programs"
_ENVIRONMENTS = ROOT / "build" / "clients"
_TIMEOUT_S = 600.0


def main(names: list[str]) -> int:
    """Run programs, all by default; return 1 if any fails."""
    chosen = [one for one in PROGRAMS if not names or one.name in names]
    unknown = set(names) - {one.name for one in chosen}
    if unknown:
        print(f"There is no {', '.join(sorted(unknown))}.", file=sys.stderr)
        return 2
    pythons = {one.name: _environment(one) for one in chosen}
    failed: list[str] = []
    with ServerProcess(("--executor=local", "--dtype=float32", "--log-level=warning")) as server:
        for program in chosen:
            script = _PROGRAMS / f"{program.name}.py"
            command = [str(pythons[program.name]), str(script), server.url, str(TINY_LLAMA)]
            done = subprocess.run(
                command, timeout=_TIMEOUT_S, check=False, cwd=_ENVIRONMENTS, env=_environ()
            )
            if done.returncode:
                failed.append(program.name)
    print(f"{len(chosen) - len(failed)} of {len(chosen)} programs work.")
    if failed:
        print(f"Failed: {', '.join(failed)}.", file=sys.stderr)
    return 1 if failed else 0


def _environment(program: Program) -> Path:
    """Return the interpreter of a program's environment, which is made if it is missing."""
    folder = _ENVIRONMENTS / program.name
    python, stamp = folder / "bin" / "python", folder / "installed"
    wanted = "\n".join((*program.packages, *program.without_needs))
    if not stamp.is_file() or stamp.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*install, *program.packages], check=True, env=_environ())
        if program.without_needs:
            command = [*install, "--no-deps", *program.without_needs]
            subprocess.run(command, check=True, env=_environ())
        stamp.write_text(wanted)
    return python


def _environ() -> dict[str, str]:
    # Otherwise an environment could have modules of the checkout.
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
