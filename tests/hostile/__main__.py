"""All attacks in full, each on a server of its own: `python -m tests.hostile`.

Honest clients are measured without the attack, beside it, and the server's memory some seconds
after it. Exits with 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import traceback
from typing import TYPE_CHECKING

from tests.hostile.attacks.catalog import ATTACKS
from tests.hostile.outcome import TABLE_HEAD, Outcome
from tests.hostile.repeated_trial import RepeatedTrial
from tests.hostile.series import Series, Timing
from tests.load.measured_server import pin_load
from tests.load.report import Report

if TYPE_CHECKING:
    from collections.abc import Sequence


def main() -> int:
    """Run the attacks, print a table and return the exit code."""
    names = sorted(ATTACKS)
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"(all) {', '.join(names)}")
    parser.add_argument("--seconds", type=float, help="of each attack (its own)")
    parser.add_argument("--before-s", type=float, default=3.0, help="(%(default)s)")
    parser.add_argument("--after-s", type=float, default=4.0, help="(%(default)s)")
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
    chosen = options.attacks or names
    timing = Timing(seconds=options.seconds, before_s=options.before_s, after_s=options.after_s)
    attacks = [ATTACKS[name]() for name in chosen for _ in range(options.repeats)]
    outcomes = Series(attacks, timing, has_rank_processes=options.executor == "ray").run()
    rows, has_held, started_s = [], True, time.monotonic()
    for number, name in enumerate(chosen, 1):
        row, held = _add_trial(report, name, list(itertools.islice(outcomes, options.repeats)))
        rows.append(row)
        has_held = has_held and held
        # What was measured survives whatever happens to the others.
        report.write(options.output)
        minutes = (time.monotonic() - started_s) / 60
        left = minutes / number * (len(chosen) - number)
        print(f"{number} of {len(chosen)}, about {left:.1f} minutes left", file=sys.stderr)
        print(row, file=sys.stderr, flush=True)
    print("\n".join([TABLE_HEAD, *rows]))
    return 0 if has_held else 1


def _add_trial(
    report: Report, name: str, outcomes: Sequence[Outcome | Exception]
) -> tuple[str, bool]:
    """Report an attack's trials; return their row and whether everything held."""
    errors = [one for one in outcomes if isinstance(one, Exception)]
    if errors:
        traceback.print_exception(errors[0])
        return f"{name:28} failed: {errors[0]!r:.200}", False
    trial = RepeatedTrial(tuple(one for one in outcomes if isinstance(one, Outcome)))
    report.add(name, trial.figures())
    return trial.row(), not trial.not_held()


if __name__ == "__main__":
    sys.exit(main())
