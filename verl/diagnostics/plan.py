"""Predict the memory of a run and its batches before it starts.

It reads the keys and the models' config.json, and no data.
"""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from verl.config.async_training import AsyncTrainingConfig
from verl.utils.entry import exit_code
from verl.utils.errors import ConfigError
from verl.utils.garbage import loading_packages

if TYPE_CHECKING:
    from verl.diagnostics.proposal import Proposal


def main(argv: list[str] | None = None) -> int:
    """Print the plan.

    Return 0 if it fits or the device is unknown, 2 if it does not fit, 1 for errors.
    """
    parser = argparse.ArgumentParser(
        prog="verl plan",
        usage=(
            "verl plan [--sft] [--device-gib GIB|CARD] [--json] [--run FOLDER] [config.yaml] "
            "[key=value ...]"
        ),
        description=__doc__,
        epilog="Keys are those of the run: every key with its default is in `verl train --cfg job`.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device-gib", help="memory of a device in GiB, or a card: H100, A100-40, L40S ..."
    )
    parser.add_argument(
        "--run",
        metavar="FOLDER",
        help="of a synchronous run: propose a schedule and a split of the ranks from its times",
    )
    parser.add_argument("--sft", action="store_true", help="the keys are those of `verl sft`")
    parser.add_argument("--json", action="store_true", help="for programs; sizes are bytes")
    arguments, rest = parser.parse_known_args(argv)
    return exit_code(lambda: _plan(arguments, rest))


def _plan(arguments: argparse.Namespace, keys: list[str]) -> int:
    # Here, so that a typing error in a key is reported before torch loads.
    from verl.config.load import load_config

    if arguments.run is not None and arguments.sft:
        raise ConfigError(
            "--run proposes a schedule of training with a rollout, and --sft plans fine-tuning. "
            "Leave one of them out."
        )
    if arguments.run is not None and not keys:
        proposal = _proposal(arguments.run, AsyncTrainingConfig())
        print(json.dumps(proposal.values()) if arguments.json else proposal.table())
        return 0
    root = "sft_trainer" if arguments.sft else "ppo_trainer"
    config = load_config(keys, root=root, only_to_plan=True)
    with loading_packages():
        from verl.diagnostics.profile import profile_memory
    profile = profile_memory(config, device_gib=arguments.device_gib)
    proposal = None
    if arguments.run is not None:
        proposal = _proposal(arguments.run, config.async_training)

    if arguments.json:
        others = {} if proposal is None else {"proposal": proposal.values()}
        print(profile.to_json(**others))
    else:
        print(profile)
        if proposal is not None:
            print(f"\n{proposal.table()}")
    return 2 if profile.fits is False else 0


def _proposal(run: str, options: AsyncTrainingConfig) -> "Proposal":
    """Return the schedule and the split that the times of a recorded run propose."""
    with loading_packages():
        from verl.diagnostics.proposal import proposal_of_run
    return proposal_of_run(run, options.staleness_threshold)


if __name__ == "__main__":
    sys.exit(exit_code(main))
