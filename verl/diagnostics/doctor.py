"""Check whether this machine is fit to train, and print the command that fixes each fault."""

import argparse
import sys

from verl.diagnostics import host_checks, software_checks
from verl.diagnostics.connectivity import test_ray_connectivity
from verl.diagnostics.findings import EnvReport, Finding
from verl.diagnostics.world import World, read_world
from verl.utils.entry import exit_code
from verl.utils.errors import ConfigError, MissingDependencyError

# In the order of fixing: later faults may follow from earlier ones.
CHECKS = (
    software_checks.python_version,
    software_checks.missing,
    software_checks.other_verl,
    software_checks.conda_and_pip,
    software_checks.torch_import,
    software_checks.probe_ended,
    software_checks.build_and_driver,
    software_checks.gpus,
    software_checks.cuda_libraries,
    software_checks.attention,
    software_checks.versions,
    software_checks.binary_interfaces,
    host_checks.shared_memory,
    host_checks.open_files,
    host_checks.memory,
    host_checks.disks,
    host_checks.nccl_variables,
)


def check_env(world: World | None = None) -> EnvReport:
    """Check this machine and return the findings, which print as a table.

    torch is imported and called in a process of its own, so that a broken one cannot take this
    process with it.

    Args:
        world: facts that were read before; None: read those of this machine.
    """
    seen = read_world() if world is None else world
    return EnvReport([finding for check in CHECKS for finding in check(seen)])


def main(argv: list[str] | None = None) -> int:
    """Print the report. Return 1 where something is broken."""
    parser = argparse.ArgumentParser(description=__doc__, prog="verl doctor", allow_abbrev=False)
    parser.add_argument(
        "--json",
        action="store_true",
        help="for programs: verdict, evidence and fix of every finding",
    )
    parser.add_argument(
        "--ray", action="store_true", help="also the links between the nodes of the Ray cluster"
    )

    arguments = parser.parse_args(argv)
    report = check_env()
    if arguments.ray:
        report = EnvReport([*report.findings, *_ray_links()])
    print(report.to_json() if arguments.json else report)

    return report.exit_code


def _ray_links() -> list[Finding]:
    """Measure the links between the nodes of the Ray cluster."""
    try:
        return list(test_ray_connectivity().findings)
    except MissingDependencyError as error:
        return [Finding("Ray links", "broken", str(error), "pip install 'ray>=2.40'")]
    except (ConfigError, ConnectionError) as error:  # no cluster answers
        return [Finding("Ray links", "broken", " ".join(str(error).split()), "ray start --head")]


if __name__ == "__main__":
    sys.exit(exit_code(main))
