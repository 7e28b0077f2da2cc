"""The runs below a folder, in a table: ``python -m trainer.runs <folder>``."""

from __future__ import annotations

import argparse
import csv
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.messages import listed
from trainer.reporting.comparison import Comparison, Row, differences, short_names
from trainer.reporting.summary import Summary, find_runs, read_summary
from trainer.run_dir import folder_of

if TYPE_CHECKING:
    from rich.table import Table

_SHOWN = ("run", "state", "step", "epoch", "world_size", "time_s")
_HEADS = {"world_size": "ranks", "time_s": "time"}
_GAP = 2  # between two columns
_NO_RUN = "no run in it"
_WIDE = 10_000  # where no terminal cuts lines


def read_runs(folders: Sequence[Path]) -> tuple[list[Summary], dict[Path, str]]:
    """Return the runs at and below ``folders``, and which folders hold none, and why.

    Raises:
        ValueError: If there is no such folder, or no run at all.
    """
    runs: list[Summary] = []
    left_out: dict[Path, str] = {}
    for folder in dict.fromkeys(folders):
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; give that of a run, or of several")
        found, others = find_runs(folder)
        left_out |= dict.fromkeys(others, _NO_RUN)
        for path in found:
            try:
                runs.append(read_summary(path))
            except (ValueError, OSError) as error:
                left_out[path] = str(error)
    if not runs:
        reasons = dict.fromkeys(why for why in left_out.values() if why != _NO_RUN)
        raise ValueError(
            f"there is no run in {listed(map(str, folders))}: no folder with a run.json, a "
            "metrics.jsonl or checkpoints" + "".join(f"; {why}" for why in reasons)
        )
    return runs, left_out


def main(arguments: list[str] | None = None) -> None:
    """Run the command line program."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.runs",
        description="List the runs below a folder, with the options in which they differ. Given "
        "the folders of exactly two runs, show what differs between these.",
    )
    parser.add_argument("folders", nargs="+", help="of runs, or above them: outputs, multirun, ...")
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help="tell of this metric, in place of the monitored one; name:max where the largest "
        "value is the best; may be given several times",
    )
    parser.add_argument("--sort", metavar="COLUMN", help="a metric (the best first), or a column")
    parser.add_argument("--reverse", action="store_true", help="turn the order around")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="every column, for a spreadsheet")
    form.add_argument("--json", action="store_true", help="likewise, for a program")
    given = parser.parse_args(arguments)
    folders = [folder_of(folder) for folder in given.folders]
    try:
        runs, left_out = read_runs(folders)
        compared = Comparison(runs, given.metric)
        columns = {head: column for column, head in _HEADS.items()}
        rows = compared.rows(columns.get(given.sort, given.sort), given.reverse)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    two = [next((run for run in runs if run.folder == folder), None) for folder in folders]
    try:
        if given.csv:
            _write_csv(rows)
        elif len(runs) == 2 and len(two) == 2 and two[0] and two[1]:
            _show_two(two[0], two[1], rows, given.json)
        elif given.json:
            print(json.dumps(rows, indent=2, default=str))
        else:
            _show(compared, rows)
        sys.stdout.flush()
    except BrokenPipeError:  # of | head
        sys.stderr.close()
        return
    _tell(_remarks(runs, left_out))


def _show(compared: Comparison, rows: Sequence[Row]) -> None:
    """Print the table, and name the options for which the terminal is too narrow."""
    console = _console()
    heads = dict(_HEADS)
    columns = [*_SHOWN]
    for name in compared.modes:
        columns += [name, f"best {name}"]
        heads[f"best {name}"] = "best"
    cells = {column: [_cell(column, row) for row in rows] for column in columns}
    needed = sum(_width(heads.get(c, c), cells[c]) for c in columns)
    room = console.width - needed
    console.width = max(console.width, needed)  # lines that go on in the next are read more easily
    hidden = []
    for name, short in short_names(compared.options).items():
        values = [_plain(row[name]) for row in rows]
        if short.endswith("_target_"):  # the class, not where it is
            short, values = name.rpartition(".")[0], [v.rpartition(".")[2] for v in values]
        room -= _width(short, values)
        if room < 0:
            hidden.append(name)
        else:
            heads[name], cells[name] = short, values
    table = _table([heads.get(column, column) for column in cells])
    for line in zip(*cells.values(), strict=True):
        _add(table, line)
    console.print(table)
    if hidden:
        print(f"\nalso different: {listed(hidden, 20)} (a wider terminal or --csv shows them)")


def _show_two(one: Summary, other: Summary, rows: Sequence[Row], as_json: bool) -> None:
    """Print what differs between two runs."""
    found = differences(one, other)
    by_folder = {row["folder"]: row for row in rows}
    pair = [by_folder[str(run.folder)] for run in (one, other)]
    if as_json:
        print(json.dumps({"runs": pair, **found}, indent=2, default=str))
        return
    table = _table(["", *(row["run"] for row in pair), "difference"])
    for column in ("state", "reason", "step", "epoch", "world_size", "time_s"):
        _add(table, [_HEADS.get(column, column), *(_cell(column, row) for row in pair), ""])
    for title, values in found.items():
        if values:
            _add(table, [""] * 4)
            _add(table, [title, "", "", ""])
        for name, (left, right) in values.items():
            change = _change(left, right) if title == "metrics" else ""
            _add(table, [f"  {name}", _plain(left), _plain(right), change])
    _console().print(table)


def _write_csv(rows: Sequence[Row]) -> None:
    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _remarks(runs: Iterable[Summary], left_out: dict[Path, str]) -> Iterator[str]:
    for run in runs:
        for problem in run.problems:
            yield f"{run.folder}: {problem}"
        if run.state == "failed":
            why = (run.reason or "").partition("\n")[0]
            yield f"{run.folder} failed: {textwrap.shorten(why, 160, placeholder=' ...')}"
    for folder, why in left_out.items():
        yield f"left out {folder}: {why}"


def _tell(remarks: Iterable[str], most: int = 10) -> None:
    """Print remarks where they do not get into what a program reads."""
    told = list(remarks)
    for remark in told[:most]:
        print(f"note: {remark}", file=sys.stderr)
    if len(told) > most:
        print(f"note: and {len(told) - most} more", file=sys.stderr)


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False)


def _table(heads: Sequence[str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for head in heads:
        table.add_column(Text(head), no_wrap=True)
    return table


def _add(table: Table, cells: Iterable[str]) -> None:
    from rich.text import Text

    table.add_row(*map(Text, cells))


def _width(head: str, cells: Sequence[str]) -> int:
    return max(map(len, (head, *cells))) + _GAP


def _cell(column: str, row: Row) -> str:
    value = row[column]
    if column == "time_s" and value is not None:
        return str(timedelta(seconds=round(value)))
    if column == "step" and row["state"] != "finished" and row["total_steps"]:
        return f"{_plain(value)}/{row['total_steps']}"
    return _plain(value)


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.5g}"
    return str(value)


def _change(left: Any, right: Any) -> str:
    if not (isinstance(left, int | float) and isinstance(right, int | float)) or left == right:
        return ""
    return f"{right - left:+.3g}"


if __name__ == "__main__":
    main()
