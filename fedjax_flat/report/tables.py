"""Plain-text tables that fit a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_flat import errors


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)
) -> str:
    """The columns in `left` are aligned there, the others to the right."""
    cells = [[errors.printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(r[i]) for r in cells) for i in range(len(header))]

    def line(row):
        aligned = (
            c.ljust(w) if i in left else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(aligned).rstrip()

    rule = "  ".join("-" * w for w in widths)
    return "\n".join([line(cells[0]), rule, *[line(r) for r in cells[1:]]])


def of_records(records: Sequence[Mapping[str, Any]], left: Sequence[int] = (0,)) -> str:
    """Records with the same names, one per row; four digits, None as nothing."""

    def show(value):
        return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    header = list(records[0])
    return table(header, [[show(r[name]) for name in header] for r in records], left)


def named(label: str, path: Any) -> str:
    """'figure: runs/a/figures/score.png'."""
    return f"{label}: {errors.printable(str(path))}"


def percent(mean: float, deviation: float) -> str:
    """Mean and spread over the last rounds: '91.27 ± 0.40'."""
    return f"{100 * mean:.2f} ± {100 * deviation:.2f}"


def bytes_of(count: float) -> str:
    """'6.76 MB'."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = max(0, min(len(units) - 1, (len(str(int(count))) - 1) // 3))
    return f"{count / 1000**power:.3g} {units[power]}"
