"""Step times and idle ratios of every schedule, by the simulator of `verl.diagnostics.schedules`.

The defaults are near one H200 with Qwen2.5-1.5B: 68,900 tok/s at 1,024 rows of 600 tokens and
24,700 tok/s at 256 rows of 2,650, where 80,300 and 26,600 were measured; replace them by measured
times. `verl plan --run FOLDER` takes them from the record of a run.

    python bench/schedule_sim.py --prompts 64 --samples 16 --new-tokens 8192 --devices 1,2,8,64
"""

import argparse

from rollout_work import draw_limits

from verl.diagnostics.schedules import Costs, Work, all_schedules, best_split


def add_costs(parser: argparse.ArgumentParser) -> None:
    """Add the options of `costs_of`."""
    parser.add_argument("--decode-s", type=float, default=3.4e-3, help="a step without rows")
    parser.add_argument("--row-s", type=float, default=6.5e-6, help="a row of a step")
    parser.add_argument("--cached-token-s", type=float, default=7.8e-9, help="a token in the cache")
    parser.add_argument("--prefill-token-s", type=float, default=8e-6)
    parser.add_argument("--token-s", type=float, default=2.0e-5, help="a token of an update")
    parser.add_argument("--sync-s", type=float, default=0.02, help="a hand-over")


def costs_of(given: argparse.Namespace) -> Costs:
    """Return the costs that the options give."""
    return Costs(
        given.decode_s,
        given.row_s,
        given.cached_token_s,
        given.prefill_token_s,
        given.token_s,
        given.sync_s,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=8192, help="of the longest response")
    parser.add_argument("--devices", default="1,2,4,8,64,512", help="by commas")
    parser.add_argument("--staleness", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    add_costs(parser)
    return parser.parse_args()


def main() -> None:
    given = parse_arguments()
    costs = costs_of(given)
    rows = given.steps * given.prompts * given.samples
    work = Work(
        prompts=given.prompts,
        samples=given.samples,
        prompt_tokens=given.prompt_tokens,
        lengths=draw_limits(f"tail:{given.new_tokens}", rows, given.seed).tolist(),
        steps=given.steps,
        warm_up=min(3, given.steps // 4),
    )
    print(
        "| devices | schedule | s a step | times sync | generators | trainer idle | rollout idle |"
    )
    print("|---|---|---|---|---|---|---|")
    for devices in map(int, given.devices.split(",")):
        results = all_schedules(work, costs, devices, given.staleness)
        sync_s = results["sync"].step_s
        lending = best_split(work, costs, devices, "lending", given.staleness)
        if lending is not None:
            results["lending"] = lending
        for name, result in results.items():
            print(
                f"| {devices} | {name} | {result.step_s:.1f} | "
                f"{sync_s / result.step_s:.2f} | {result.generators or 'all'} | "
                f"{result.trainer_idle:.0%} | {result.rollout_idle:.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
