"""The picture of a run, from its files: ``python -m trainer.report <run_dir>``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainer.reporting.page import FILE, write_report


def main(arguments: list[str] | None = None) -> None:
    """Run the command line program."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.report",
        description="Write the report of a run: one HTML file, which needs no network. The run may "
        "be finished, resumed, dead or still at work.",
    )
    parser.add_argument("run_dir", type=Path, help="the folder of the run")
    parser.add_argument("out", type=Path, nargs="?", help=f"the file; {FILE} in that folder")
    given = parser.parse_args(arguments)
    try:
        print(write_report(given.run_dir, given.out))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
