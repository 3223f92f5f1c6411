"""`verl view [RUN ...]`: look at recorded runs in a browser."""

import argparse
import sys
import webbrowser
from pathlib import Path

from verl.utils.entry import exit_code
from verl.utils.errors import ConfigError, DataError


def main(argv: list[str] | None = None) -> int:
    """Serve the page until Ctrl-C, or write it into a file; return the exit code."""
    parser = argparse.ArgumentParser(prog="verl view", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="folders of runs (trainer.default_local_dir); none: all under checkpoints/",
    )
    parser.add_argument("--export", metavar="FILE.html", help="write one file that opens offline")
    parser.add_argument("--port", type=int, default=0, help="of the server; default: a free one")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    arguments = parser.parse_args(argv)
    return exit_code(lambda: view(arguments))


def view(arguments: argparse.Namespace) -> None:
    """Serve or export the page. Imports are local: --help needs no pyarrow."""
    from verl.diagnostics.view.answers import Answers
    from verl.diagnostics.view.page import exported_page
    from verl.diagnostics.view.server import ViewServer
    from verl.tracking.records import load_run
    from verl.utils.whole_file import whole_file

    if arguments.export and Path(arguments.export).is_dir():
        raise ConfigError(
            f"--export must name a file, got the folder '{arguments.export}'. Write "
            f"{Path(arguments.export) / 'run.html'}."
        )

    folders = [Path(run) for run in arguments.runs] or _recorded_runs()
    answers = Answers([load_run(folder) for folder in folders])
    if arguments.export:
        page, notes = exported_page(answers)
        with whole_file(Path(arguments.export)) as file:
            file.write_text(page, encoding="utf-8")
        print(f"Wrote {arguments.export} ({len(page) / 2**20:.1f} MiB). {' '.join(notes)}".rstrip())
        return

    server = ViewServer(answers, arguments.port)
    print(f"Open {server.url}", flush=True)
    print("The address is for this machine and this user alone. Ctrl-C ends.", flush=True)
    if arguments.open:
        webbrowser.open(server.url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("Ended.")
    finally:
        server.server_close()


def _recorded_runs() -> list[Path]:
    """Return the recorded runs under the default folder, the newest first."""
    found = list(Path("checkpoints").glob("**/records/run.json"))
    if not found:
        raise DataError(
            f"Found no recorded run under {Path('checkpoints').absolute()}. Name the folder of "
            "one: verl view RUN (trainer.default_local_dir)."
        )
    found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return [path.parent.parent for path in found[:8]]


if __name__ == "__main__":
    sys.exit(exit_code(main))
