"""Which rank the others wait for when they have all come to a halt, in words."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from trainer.diagnosis.rank_report import RankReport

_MOST_STACKS = 3


def told(
    reports: Sequence[RankReport],
    timeout_s: float,
    absent: Sequence[int] = (),
    elsewhere: Sequence[int] = (),
) -> str:
    """Say which rank hangs, in the first line; then where, and what the others wait for.

    Args:
        reports: Of all ranks that report, or that can be seen from outside.
        timeout_s: The limit once a step is done; a report with another one is of the start.
        absent: The other ranks.
        elsewhere: Those of other machines, which nobody here could ask.
    """
    to_blame = [report for report in reports if report.waits_for is None]
    to_blame = [report for report in to_blame if report.is_late] or to_blame
    headlines = [f"{_ranks(absent)} did not answer: stopped, gone, or without the GIL"]
    if to_blame or not absent:
        accused = _accused(to_blame, reports, timeout_s) if to_blame else _entangled(reports)
        if elsewhere and not to_blame:
            here = _ranks(_numbers(reports))
            accused = (
                f"{here} waited too long for others in {reports[0].waits_for}: the cause is on "
                f"another machine, which has {_ranks(elsewhere)}, or in the network"
            )
        headlines = [accused, *(headlines if absent else [])]
    lines = ["; ".join(headlines)]
    shown = to_blame or ([] if absent else reports)
    for same in list(_grouped(shown, lambda r: (r.stack, _waiting(r))))[:_MOST_STACKS]:
        stack = same[0].stack or "  no Python stack can be had"
        where = f"process {same[0].pid}" if to_blame else _doing(same)
        lines += [f"{_ranks(_numbers(same))}, {where}:", stack.rstrip("\n")]
    others = [report for report in reports if report not in shown]
    lines += [f"{_ranks(_numbers(same))}: {_doing(same)}" for same in _grouped(others, _waiting)]
    return "\n".join(lines)


def _accused(
    to_blame: Sequence[RankReport], reports: Sequence[RankReport], timeout_s: float
) -> str:
    """Say what the ranks do that do not wait for others."""
    worst = max(to_blame, key=lambda report: report.seconds)
    is_late = worst.is_late
    parts = []
    for same in _grouped(to_blame, lambda report: report.phase):
        verb, be = ("hangs", "is") if len(same) == 1 else ("hang", "are")
        does = verb if is_late else f"{be} late,"
        parts.append(f"{_ranks(_numbers(same))} {does} {_doing(same)}")
    text = "; ".join(parts)
    if len(to_blame) < len(reports):
        text += ", and the others wait for it"
    elif len(reports) > 1:
        text += "; no rank waits for another"
    if worst.trouble:
        text += f"; {worst.trouble}"
    elif is_late:
        option = "timeout_s" if worst.limit_s == timeout_s else "start_timeout_s"
        text += f". {option}={worst.limit_s:g} allows no more: raise it if this may take longer"
    return text


def _entangled(reports: Sequence[RankReport]) -> str:
    """Say what the ranks wait for where each waits for another."""
    groups = _grouped(reports, _waiting)
    if len(groups) == 1:
        return (
            f"all ranks wait in the same collective, {reports[0].waits_for}: the network between "
            "them does not answer"
        )
    parts = (f"{_ranks(_numbers(same))} for {same[0].waits_for}" for same in groups)
    return (
        f"the ranks wait for different collectives: {', '.join(parts)}. Every rank must run the "
        "same ones in the same order"
    )


def _doing(same: Sequence[RankReport]) -> str:
    """Say what ranks do that do the same."""
    first, seconds = same[0], max(report.seconds for report in same)
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
    text = f"{first.phase} for {seconds:.1f} s (since {since}), at step {first.step}"
    bucket = f"bucket {first.bucket} of {first.num_buckets}"
    has_buckets = 0 < first.bucket <= first.num_buckets
    if first.waits_for is not None:
        what = f"{bucket}, {first.waits_for}" if has_buckets else f"{first.waits_for}"
        return f"{text}, waits for {what}"
    if has_buckets:
        text += f", after {bucket}"
    return text


def _waiting(report: RankReport) -> Hashable:
    """Return what reports share that can be told together."""
    waits_for = report.waits_for
    same = waits_for and waits_for._replace(since=0.0)
    return report.phase, report.step, same, report.trouble


def _grouped(
    reports: Iterable[RankReport], key: Callable[[RankReport], Hashable]
) -> list[list[RankReport]]:
    """Return the reports with the same key together, the smallest group first."""
    groups: dict[Any, list[RankReport]] = defaultdict(list)
    for report in reports:
        groups[key(report)].append(report)
    return sorted(groups.values(), key=len)


def _numbers(reports: Iterable[RankReport]) -> list[int]:
    return [report.rank for report in reports]


def _ranks(numbers: Sequence[int]) -> str:
    """Say it as ``rank 1`` or ``ranks 0, 2-5``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    texts = (
        f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts
    )
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(texts)}"
