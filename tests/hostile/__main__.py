"""All attacks in full, each on a server of its own: `python -m tests.hostile`.

Honest clients are measured without the attack, beside it, and the server's memory some seconds
after it. Exits with 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from tests.hostile.attacks.catalog import ATTACKS
from tests.hostile.hostile_server import HostileServer, ServerOptions
from tests.hostile.outcome import TABLE_HEAD
from tests.hostile.trial import Trial, attacker_process
from tests.load.measured_server import pin_load
from tests.load.report import Report

_WARM_UP_S = 1.0


def main() -> int:
    """Run the attacks, print a table and return the exit code."""
    names = sorted(ATTACKS)
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"(all) {', '.join(names)}")
    parser.add_argument("--seconds", type=float, help="of each attack (its own)")
    parser.add_argument("--before-s", type=float, default=5.0, help="(%(default)s)")
    parser.add_argument("--after-s", type=float, default=10.0, help="(%(default)s)")
    parser.add_argument("--executor", choices=("local", "ray"), default="local")
    Report.add_argument(parser)
    options = parser.parse_args()
    if unknown := set(options.attacks) - set(names):
        parser.error(f"unknown attacks: {', '.join(sorted(unknown))}; choose from {names}")
    report = Report("tests.hostile")
    pin_load()
    rows, has_held = [], True
    for name in options.attacks or names:
        attack = ATTACKS[name]()
        server_options = ServerOptions.of(attack)
        with (
            HostileServer(server_options, has_rank_processes=options.executor == "ray") as server,
            attacker_process() as attacker,
        ):
            trial = Trial(server, attacker)
            asyncio.run(trial.warm_up(_WARM_UP_S))
            outcome = asyncio.run(
                trial.run(
                    attack,
                    seconds=options.seconds or attack.full_s,
                    before_s=options.before_s,
                    after_s=options.after_s,
                )
            )
            report.add(name, {"server": server.measured.command, **outcome.figures()})
        rows.append(outcome.row())
        has_held = has_held and not outcome.damage() and not outcome.delays()
    print("\n".join([TABLE_HEAD, *rows]))
    report.write(options.output)
    return 0 if has_held else 1


if __name__ == "__main__":
    sys.exit(main())
