"""All attacks in full, each on a server of its own: `python -m tests.hostile`.

Honest clients are measured without the attack, beside it, and the server's memory some seconds
after it. Exits with 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING

from tests.hostile.attacks.catalog import ATTACKS
from tests.hostile.hostile_server import HostileServer, ServerOptions
from tests.hostile.outcome import TABLE_HEAD
from tests.hostile.repeated_trial import RepeatedTrial
from tests.hostile.trial import Trial, attacker_process
from tests.load.measured_server import pin_load
from tests.load.report import Report

if TYPE_CHECKING:
    from tests.hostile.attack import Attack
    from tests.hostile.outcome import Outcome

_WARM_UP_S = 1.0


def main() -> int:
    """Run the attacks, print a table and return the exit code."""
    names = sorted(ATTACKS)
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"(all) {', '.join(names)}")
    parser.add_argument("--seconds", type=float, help="of each attack (its own)")
    parser.add_argument("--before-s", type=float, default=5.0, help="(%(default)s)")
    parser.add_argument("--after-s", type=float, default=10.0, help="(%(default)s)")
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        help="servers to attack; the median counts for the time between tokens (%(default)s)",
    )
    parser.add_argument("--executor", choices=("local", "ray"), default="local")
    Report.add_argument(parser)
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if unknown := set(options.attacks) - set(names):
        parser.error(f"unknown attacks: {', '.join(sorted(unknown))}; choose from {names}")
    report = Report("tests.hostile")
    pin_load()
    rows, has_held = [], True
    for name in options.attacks or names:
        attack = ATTACKS[name]()
        trial = RepeatedTrial(tuple(_outcome(attack, options) for _ in range(options.repeats)))
        report.add(name, trial.figures())
        rows.append(trial.row())
        has_held = has_held and not trial.not_held()
    print("\n".join([TABLE_HEAD, *rows]))
    report.write(options.output)
    return 0 if has_held else 1


def _outcome(attack: Attack, options: argparse.Namespace) -> Outcome:
    """Return how a new server fares under an attack."""
    has_rank_processes = options.executor == "ray"
    with (
        HostileServer(ServerOptions.of(attack), has_rank_processes=has_rank_processes) as server,
        attacker_process() as attacker,
    ):
        trial = Trial(server, attacker)
        asyncio.run(trial.warm_up(_WARM_UP_S))
        return asyncio.run(
            trial.run(
                attack,
                seconds=options.seconds or attack.full_s,
                before_s=options.before_s,
                after_s=options.after_s,
            )
        )


if __name__ == "__main__":
    sys.exit(main())
