"""Rows of the benchmark: as a table for people, as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

COLUMNS = ("label", "samples", "avg_in", "max_new", "time(s)", "tokens", "tok/s", "mem(GB)", "engine")


@dataclass(frozen=True)
class Row:
    """One engine's result for one label."""

    label: str
    engine: str
    samples: int
    avg_in: float
    max_new: int
    time_s: float
    tokens: int
    tok_per_s: float
    mem_gb: float


@dataclass(frozen=True)
class Skipped:
    """A row that has no figures, and why: the engine has no such row, or it failed."""

    label: str
    engine: str
    samples: int
    avg_in: float
    max_new: int
    reason: str
    failed: bool = False


class Reference:
    """The tok/s of an earlier run, by label and engine."""

    def __init__(self, path: Path) -> None:
        """Reads a file that `write_json` wrote.

        Raises:
            ValueError: the file has another form.
        """
        self.name = path.stem
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
            self._rates = {(row["label"], row["engine"]): float(row["tok_per_s"]) for row in rows}
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no result file of this script: {error!r}; make one with --json") from error

    def rate(self, label: str, engine: str) -> float | None:
        """That run's tok/s, None if it has no such row."""
        return self._rates.get((label, engine))


def format_table(rows: Sequence[Row | Skipped], engines: Sequence[str], reference: Reference | None = None) -> str:
    """One line per row. A ratio says how many times as fast the row is as that engine, or as the earlier run.

    Args:
        rows: what was measured or skipped, in the order to print.
        engines: gets a ratio column each, if there are two or more.
        reference: gets a ratio column too: the same label and engine, then and now.
    """
    ratios = list(engines) if len(engines) > 1 else []
    header = [*COLUMNS, *(f"x {name}" for name in ratios), *([f"x {reference.name}"] if reference else [])]
    rates = {(row.label, row.engine): row.tok_per_s for row in rows if isinstance(row, Row)}
    cells = [header]
    for row in rows:
        against = [rates.get((row.label, name)) for name in ratios]
        if reference:
            against.append(reference.rate(row.label, row.engine))
        cells.append(_row_cells(row, against))
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    left = (0, COLUMNS.index("engine"))
    lines = []
    for line in cells:
        padded = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=False))]
        lines.append("  ".join([*padded, *line[len(header) :]]).rstrip())
    lines.insert(1, "-" * max(map(len, lines[:1])))
    return "\n".join(lines)


def _row_cells(row: Row | Skipped, against: Sequence[float | None]) -> list[str]:
    first = [row.label, str(row.samples), f"{row.avg_in:.1f}", str(row.max_new)]
    if isinstance(row, Skipped):
        return [*first, "-", "-", "-", "-", row.engine, *("-" for _ in against), row.reason]
    figures = [f"{row.time_s:.2f}", str(row.tokens), f"{row.tok_per_s:.1f}", f"{row.mem_gb:.2f}"]
    ratios = [f"{row.tok_per_s / rate:.2f}" if rate else "-" for rate in against]
    return [*first, *figures, row.engine, *ratios]


def format_peers(rows: Sequence[Row | Skipped], engines: Sequence[str]) -> str:
    """One line per label: the rate of every engine, and how many times as fast the first one is as each other.

    The row without tokens to count is the time to the first token, in seconds.
    """
    first, *others = engines
    cells = [["label", "samples", "avg_in", "max_new", *engines, *(f"x {name}" for name in others)]]
    by_label: dict[str, dict[str, Row | Skipped]] = {}
    for row in rows:
        by_label.setdefault(row.label, {})[row.engine] = row
    for label, mine in by_label.items():
        some = next(iter(mine.values()))
        rates = {name: row.tok_per_s for name, row in mine.items() if isinstance(row, Row)}
        figures = [_figure(mine.get(name)) for name in engines]
        ratios = [f"{rates[first] / rates[n]:.2f}" if first in rates and n in rates else "-" for n in others]
        cells.append([label, str(some.samples), f"{some.avg_in:.1f}", str(some.max_new), *figures, *ratios])
    failed = [f"{row.label}, {row.engine}: {row.reason}" for row in rows if isinstance(row, Skipped) and row.failed]
    return "\n".join([*_aligned(cells, left=(0,)), *failed])


def _figure(row: Row | Skipped | None) -> str:
    if not isinstance(row, Row):
        return "-"
    return f"{row.time_s:.1f} s" if row.tokens == 1 else f"{row.tok_per_s:.1f}"


def _aligned(cells: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = [
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def write_json(path: Path, rows: Sequence[Row | Skipped], machine: Mapping[str, Any]) -> None:
    """Writes the measured rows, the machine, and what was skipped with its reasons."""
    result = {
        "rows": [asdict(row) for row in rows if isinstance(row, Row)],
        "skipped": [asdict(row) for row in rows if isinstance(row, Skipped)],
        "machine": dict(machine),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
