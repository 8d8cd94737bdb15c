"""Draw what `ast_speed.py --growth` measured: seconds against the unique tokens of the trees.

python benchmarks/ast_speed.py --model tiny --growth --out speed.json
python benchmarks/growth_plot.py speed.json growth.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nip_astra.report.charts import nice_ticks

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 300, 50, 34, 20, 46
MORE_EPISODES, WIDER = "more episodes of width 2", "2 episodes of width 2, 3, 4"
COLORS = {MORE_EPISODES: "#b8410f", WIDER: "#1f6f8b"}

Row = Mapping[str, Any]


def seconds_of(row: Row) -> float:
    """The seconds of an iteration: its rollout and its updates."""
    return float(row["phases"]["rollout"] + row["phases"]["update"])


def drawing(rows: Sequence[Row]) -> str:
    """The plot as SVG."""
    last = max(rows, key=lambda row: row["unique_tokens"])
    x_marks = nice_ticks(0.0, last["unique_tokens"])
    y_marks = nice_ticks(0.0, max(map(seconds_of, rows)))
    to_x = _scale(x_marks[-1], LEFT, WIDTH - RIGHT)
    to_y = _scale(y_marks[-1], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" role="img">',
        "<title>Seconds of an iteration against the unique tokens of its trees</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for mark in y_marks:
        y = to_y(mark)
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{mark:g}</text>')
    for mark in x_marks:
        place = f'x="{to_x(mark)}" y="{HEIGHT - BOTTOM + 16}"'
        parts.append(f'<text {place} text-anchor="middle">{mark:,.0f}</text>')
    line = f"M{LEFT} {HEIGHT - BOTTOM}L{to_x(last['unique_tokens'])} {to_y(seconds_of(last))}"
    parts.append(f'<path d="{line}" stroke="#888" stroke-dasharray="5 4"/>')
    lines = {
        MORE_EPISODES: [row for row in rows if row["width"] == 2],
        WIDER: [row for row in rows if row["episodes"] == 2],
    }
    for number, (name, of_line) in enumerate(lines.items()):
        points = [(to_x(row["unique_tokens"]), to_y(seconds_of(row))) for row in of_line]
        path = "L".join(f"{x} {y}" for x, y in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{COLORS[name]}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3.5" fill="{COLORS[name]}"/>' for x, y in points]
        y = TOP + 14 + 17 * number
        parts.append(f'<text x="{LEFT + 12}" y="{y}" fill="{COLORS[name]}">{name}</text>')
    parts.append(f'<text x="{LEFT - 44}" y="{TOP - 6}">seconds of an iteration</text>')
    below = f'x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end"'
    parts.append(f"<text {below}>unique tokens of the trees</text></svg>")
    return "\n".join(parts) + "\n"


def _scale(limit: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: round(start + value / limit * (end - start), 1)


def main() -> None:
    """Read the figures and write the drawing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("figures", type=Path, help="what ast_speed.py --growth wrote as JSON")
    parser.add_argument("drawing", type=Path)
    options = parser.parse_args()
    growth = json.loads(options.figures.read_text(encoding="utf-8"))["growth"]
    options.drawing.write_text(drawing(growth["rows"]), encoding="utf-8")


if __name__ == "__main__":
    main()
