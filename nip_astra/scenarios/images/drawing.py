"""Drawings of images, with the latent pixels named by agents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nip_astra.scenario_base.protocol.datapoint_views import (
    Choice,
    DatapointView,
    DrawnImage,
    Frame,
    Picture,
    rounded,
)
from nip_astra.utils.formatting import items, number

IMAGE_WIDTH = 256
MAX_PIXELS = 64
"""Maximum width and height; larger images are downsampled, larger grids are not drawn."""
_SHADES = 32
"""Levels of a colour channel, so that similar neighbours are drawn as one."""


class ImageView(DatapointView):
    """An image; a symbol is a square of its grid of latent pixels, row by row."""

    def place_of(self, symbol: int) -> tuple[int, int] | None:
        return (0, symbol) if self._num_columns() else None

    def symbol(self, symbol: int) -> str:
        if not self._num_columns():
            return super().symbol(symbol)
        row, column = divmod(symbol, self._num_columns())
        return f"row {row}, column {column}"

    def picture(self, choices: Sequence[Choice]) -> Picture | None:
        image = _image(self.datapoint, choices)
        return Picture(image=image) if image is not None else None

    def _num_columns(self) -> int:
        latent = items(self.datapoint.get("latent"))
        return int(number(latent[1]) or 0) if len(latent) == 2 else 0


def _image(datapoint: Mapping[str, Any], choices: Sequence[Choice]) -> DrawnImage | None:
    rows = [items(row) for row in items(datapoint.get("pixels"))]
    if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
        return None
    latent = [int(number(size) or 0) for size in items(datapoint.get("latent"))]
    stride = max(math.ceil(max(len(rows), len(rows[0])) / MAX_PIXELS), 1)
    thinned = [row[::stride] for row in rows[::stride]]
    scale = IMAGE_WIDTH / len(thinned[0])
    height = rounded(scale * len(thinned))
    drawn = DrawnImage(
        f"Image of {len(rows[0])} by {len(rows)} pixels",
        _areas(thinned),
        scale,
        [],
        [],
        IMAGE_WIDTH,
        height,
    )
    if len(latent) == 2 and 0 < min(latent) <= max(latent) <= MAX_PIXELS:
        _add_grid(drawn, latent[0], latent[1], choices)
    return drawn


def _add_grid(drawn: DrawnImage, rows: int, columns: int, choices: Sequence[Choice]) -> None:
    cell_width, cell_height = drawn.width / columns, drawn.height / rows
    for line in range(1, columns):
        x = rounded(line * cell_width)
        drawn.lines.append((x, 0.0, x, drawn.height))
    for line in range(1, rows):
        y = rounded(line * cell_height)
        drawn.lines.append((0.0, y, drawn.width, y))
    num_frames: dict[int, int] = {}
    for choice in choices:
        if not 0 <= choice.place < rows * columns:
            continue
        row, column = divmod(choice.place, columns)
        # Frames of further agents are inside earlier ones.
        inset = 2.0 + 5.0 * num_frames.get(choice.place, 0)
        num_frames[choice.place] = num_frames.get(choice.place, 0) + 1
        drawn.frames.append(
            Frame(
                choice,
                rounded(column * cell_width + inset),
                rounded(row * cell_height + inset),
                rounded(max(cell_width - 2 * inset, 1.0)),
                rounded(max(cell_height - 2 * inset, 1.0)),
            )
        )
        drawn.summary += (
            f"; {choice.agent} named row {row}, column {column} in round {choice.rounds}"
        )


def _areas(rows: Sequence[Sequence[Any]]) -> list[tuple[str, str]]:
    """Return a path for each colour; equal neighbours in a row are one rectangle."""
    paths: dict[str, list[str]] = {}
    for y, row in enumerate(rows):
        colors = [_color(pixel) for pixel in row]
        start = 0
        for x in range(1, len(colors) + 1):
            if x == len(colors) or colors[x] != colors[start]:
                width = x - start
                paths.setdefault(colors[start], []).append(f"M{start} {y}h{width}v1h-{width}z")
                start = x
    return [(color, "".join(parts)) for color, parts in paths.items()]


def _color(pixel: Any) -> str:
    parts = [number(part) or 0.0 for part in (items(pixel) or [pixel])]
    parts = parts[:3] if len(parts) >= 3 else parts[:1] * 3
    step = 255.0 / (_SHADES - 1)
    shades = [round(round(min(max(part, 0.0), 255.0) / step) * step) for part in parts]
    return "#" + "".join(f"{shade:02x}" for shade in shades)
