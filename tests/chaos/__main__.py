"""`python -m tests.chaos [--tries N] [--only WORDS]`: print the table of faults."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.chaos.campaign import FAULTS, HEAD, Campaign
from tests.chaos.job import DEADLINE_S


def main() -> int:
    """Run the campaign. Returns 1 if a try did not survive."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--tries", type=int, default=10, help="of every fault and backend")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--only", default="", help="faults or backends with this in their name")
    parser.add_argument(
        "--deadline", type=float, default=DEADLINE_S, help="seconds of a call; more if it is busy"
    )
    arguments = parser.parse_args()

    failures = []
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory(prefix="verl-chaos-") as root:
        campaign = Campaign(Path(root), arguments.seed, arguments.deadline)
        for fault in FAULTS:
            for backend in fault.backends:
                if arguments.only in f"{fault.name} {backend}":
                    row = campaign.run(fault, backend, arguments.tries)
                    print(row, flush=True)
                    failures += row.failures
    for failure in failures:
        print(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
