"""All attacks in full, each on a server of its own: `python -m tests.hostile`.

Honest clients are measured without the attack, beside it, and the server's memory some seconds
after it. Exits with 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import traceback
from typing import TYPE_CHECKING

from tests.hostile.catalog import ATTACKS
from tests.hostile.trial import TABLE_HEAD, HostileServer, ServerOptions, Trial, attacker_process
from tests.load.measured_server import pin_load
from tests.load.report import Report

if TYPE_CHECKING:
    from tests.hostile.attack import Attack
    from tests.hostile.trial import Outcome


def main() -> int:
    """Run the attacks, print a table and return the exit code."""
    names = sorted(ATTACKS)
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"(all) {', '.join(names)}")
    parser.add_argument("--seconds", type=float, help="of each attack (its own)")
    parser.add_argument("--before-s", type=float, default=3.0, help="(%(default)s)")
    parser.add_argument("--after-s", type=float, default=4.0, help="(%(default)s)")
    parser.add_argument("--executor", choices=("local", "ray"), default="local")
    Report.add_argument(parser)
    options = parser.parse_args()
    if unknown := set(options.attacks) - set(names):
        parser.error(f"unknown attacks: {', '.join(sorted(unknown))}; choose from {names}")
    report = Report("tests.hostile")
    pin_load()
    chosen = options.attacks or names
    rows, has_held, started_s = [], True, time.monotonic()
    for number, name in enumerate(chosen, 1):
        try:
            outcome = _attack(ATTACKS[name], options)
        except Exception as error:
            traceback.print_exception(error)
            rows.append(f"{name:28} failed: {error!r:.200}")
            has_held = False
        else:
            report.add(name, outcome.figures())
            rows.append(outcome.row())
            has_held = has_held and not outcome.not_held()
        # What was measured survives whatever happens to the others.
        report.write(options.output)
        minutes = (time.monotonic() - started_s) / 60
        left = minutes / number * (len(chosen) - number)
        print(f"{number} of {len(chosen)}, about {left:.1f} minutes left", file=sys.stderr)
        print(rows[-1], file=sys.stderr, flush=True)
    print("\n".join([TABLE_HEAD, *rows]))
    return 0 if has_held else 1


def _attack(attack: Attack, options: argparse.Namespace) -> Outcome:
    has_rank_processes = options.executor == "ray"
    server = HostileServer(ServerOptions.of(attack), has_rank_processes=has_rank_processes)
    with server, attacker_process() as attacker:
        trial = Trial(server, attacker)

        async def run() -> Outcome:
            await trial.warm_up(0.5)
            return await trial.run(
                attack,
                seconds=options.seconds or attack.full_s,
                before_s=options.before_s,
                after_s=options.after_s,
            )

        return asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main())
