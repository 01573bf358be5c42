"""What was measured, and its three forms: a table for the terminal, JSON to keep, a picture.

A row is one figure: how many times more the other side takes than we do, or what part of it we take, whichever the goal is
stated in. The picture shows all rows in one unit, how many times less than the other side, on a log scale, with the goal as
a mark.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes
    ----------
    name, title
        For ``--only``; for the reader.
    ours, other
        What the two sides ran.
    unit
        Of *ours_values* and *other_values*: ``s``, ``CPU s``, ``MiB``.
    ours_values, other_values
        One a round.
    ratio
        The figure, in the sense of *at_least*.
    goal, at_least
        Other over ours is to be at least *goal*; or, if not *at_least*, ours over other at most.
    warm_up
        What was done before and is not in the figures.
    same
        How the results were compared, and what came out; starts with ``equal`` if they agree.
    load
        Processes that wanted to run before the row began.
    more
        Further numbers.
    """

    name: str
    title: str
    ours: str
    other: str
    unit: str
    ours_values: list[float]
    other_values: list[float]
    ratio: float
    goal: float
    at_least: bool
    warm_up: str
    same: str
    load: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def reached(self) -> bool:
        """Whether the figure is what was to be reached."""
        return self.ratio >= self.goal if self.at_least else self.ratio <= self.goal

    @property
    def times_less(self) -> float:
        """How many times less than the other side."""
        return self.ratio if self.at_least else 1 / self.ratio

    @property
    def goal_times_less(self) -> float:
        """The goal in the same unit."""
        return self.goal if self.at_least else 1 / self.goal


def number(value: float) -> str:
    """*value* with three digits that mean something."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def amount(values: list[float], unit: str) -> str:
    """Median of *values* with its unit, and how many there are if several."""
    text = f"{number(statistics.median(values))} {unit}"
    return text if len(values) == 1 else f"{text} (of {len(values)})"


def figure(row: Row) -> str:
    return f"{number(row.ratio)} x"


def goal(row: Row) -> str:
    return f"{'>=' if row.at_least else '<='} {row.goal:g} x"


def print_table(rows: list[Row], about: dict[str, Any]) -> None:
    """The table on standard output."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    title = f"neml2-build against its peers{' (--quick: small inputs, not the figures to quote)' if about.get('quick') else ''}"
    table = Table(title=title, caption=about_line(about), show_lines=True)
    for name, how in (
        ("measure", "left"),
        ("ours", "right"),
        ("other", "right"),
        ("figure", "right"),
        ("goal", "right"),
        ("results", "left"),
    ):
        table.add_column(name, justify=how)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(
            f"{row.title}\n[dim]{row.ours} : {row.other}\nwarm-up: {row.warm_up}[/dim]",
            amount(row.ours_values, row.unit),
            amount(row.other_values, row.unit),
            f"[{'green' if row.reached else 'red'}]{figure(row)}[/]",
            goal(row),
            row.same,
        )
    console.print(table)


def about_line(about: dict[str, Any]) -> str:
    """Machine and versions in one line."""
    return ", ".join(str(about[name]) for name in ("cpu", "cores", "memory", "versions", "suite") if about.get(name))


def markdown(rows: list[Row]) -> str:
    """The table as Markdown."""
    lines = ["| measure | ours | other | figure | goal | load |", "|---|---:|---:|---:|---:|---:|"]
    for row in rows:
        mine, theirs = amount(row.ours_values, row.unit), amount(row.other_values, row.unit)
        mark = "**" if row.reached else ""
        lines.append(f"| {row.title} | {mine} | {theirs} | {mark}{figure(row)}{mark} | {goal(row)} | {row.load:g} |")
    return "\n".join(lines) + "\n"


def merged(file: Path, rows: list[Row]) -> list[Row]:
    """*rows*, and those of an earlier run in *file* that were not measured again, in the order of the table."""
    known = read(file) if file.exists() else []
    fresh = {row.name: row for row in rows}
    kept = [fresh.pop(row.name, row) for row in known]
    return [*kept, *fresh.values()]


def read(file: Path) -> list[Row]:
    """The rows that `save` wrote."""
    return [Row(**row) for row in json.loads(file.read_text())["rows"]]


def save(file: Path, rows: list[Row], about: dict[str, Any]) -> None:
    """Write *rows* and what they were measured on as JSON."""
    file.write_text(json.dumps({"about": about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


# -- the picture ------------------------------------------------------------------------------------------------------

_WIDTH, _LEFT, _RIGHT, _BAR, _GAP, _TOP = 860, 330, 90, 20, 14, 56
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def svg(rows: list[Row], about: dict[str, Any]) -> str:
    """A picture: one bar a row from 1, on a log scale, and a mark at the goal."""
    values = [value for row in rows for value in (row.times_less, row.goal_times_less)] + [0.5, 2.0]
    low, high = math.log10(min(values) / 1.3), math.log10(max(values) * 1.3)

    def x(value: float) -> float:
        return _LEFT + (math.log10(value) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    bottom = _TOP + len(rows) * (_BAR + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 46}" '
        'font-family="sans-serif" font-size="12">',
        "<style>text{fill:#24292f}.axis{stroke:#8c959f}.good{fill:#2da44e}.bad{fill:#cf8a1f}.goal{stroke:#24292f;stroke-width:2}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.goal{stroke:#e6edf3}}</style>",
        f'<text x="{_WIDTH / 2}" y="20" text-anchor="middle" font-size="15">How many times less than the other side '
        "(log scale; the mark is the goal)</text>",
    ]
    for tick in _TICKS:
        if low <= math.log10(tick) <= high:
            parts.append(
                f'<line class="axis" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{_TOP - 8}" y2="{bottom}" '
                f'stroke-width="{1.5 if tick == 1 else 0.4}"/>'
                f'<text x="{x(tick):.1f}" y="{_TOP - 14}" text-anchor="middle">{tick:g}</text>'
            )
    for index, row in enumerate(rows):
        y = _TOP + index * (_BAR + _GAP)
        start, end = sorted((x(1), x(row.times_less)))
        mark = x(row.goal_times_less)
        parts.append(
            f'<text x="{_LEFT - 12}" y="{y + 14}" text-anchor="end">{escape(row.title)}</text>'
            f'<rect class="{"good" if row.reached else "bad"}" x="{start:.1f}" y="{y}" width="{max(end - start, 1):.1f}" '
            f'height="{_BAR}"><title>{escape(row.ours)} : {escape(row.other)}</title></rect>'
            f'<line class="goal" x1="{mark:.1f}" x2="{mark:.1f}" y1="{y - 3}" y2="{y + _BAR + 3}"/>'
            f'<text x="{_WIDTH - _RIGHT + 10}" y="{y + 14}">{number(row.times_less)}</text>'
        )
    parts.append(f'<text x="{_WIDTH / 2}" y="{bottom + 30}" text-anchor="middle">{escape(about_line(about))}</text></svg>')
    return "\n".join(parts) + "\n"
