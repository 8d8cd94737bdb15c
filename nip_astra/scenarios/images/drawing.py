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
    widths = {len(row) for row in rows}
    # Stored data may be anything: rows of one length that is not 0 make an image.
    if len(widths) != 1 or 0 in widths:
        return None
    num_rows = len(rows)
    num_columns = len(rows[0])
    stride = math.ceil(max(num_rows, num_columns) / MAX_PIXELS)
    thinned = [row[::stride] for row in rows[::stride]]
    scale = IMAGE_WIDTH / len(thinned[0])
    drawn = DrawnImage(
        f"Image of {num_columns} by {num_rows} pixels",
        _areas(thinned),
        scale,
        [],
        [],
        IMAGE_WIDTH,
        rounded(scale * len(thinned)),
    )
    latent = [int(number(size) or 0) for size in items(datapoint.get("latent"))]
    if len(latent) == 2 and all(1 <= size <= MAX_PIXELS for size in latent):
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
        num_before = num_frames.get(choice.place, 0)
        num_frames[choice.place] = num_before + 1
        inset = 2.0 + 5.0 * num_before
        x = rounded(column * cell_width + inset)
        y = rounded(row * cell_height + inset)
        width = rounded(max(cell_width - 2 * inset, 1.0))
        height = rounded(max(cell_height - 2 * inset, 1.0))
        drawn.frames.append(Frame(choice, x, y, width, height))
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
                rectangle = f"M{start} {y}h{width}v1h-{width}z"
                paths.setdefault(colors[start], []).append(rectangle)
                start = x
    return [(color, "".join(parts)) for color, parts in paths.items()]


def _color(pixel: Any) -> str:
    # A number, or a list of them by channel.
    channels = [number(channel) or 0.0 for channel in (items(pixel) or [pixel])]
    channels = channels[:3] if len(channels) >= 3 else channels[:1] * 3
    # Few shades: equal neighbours become one rectangle.
    step = 255.0 / (_SHADES - 1)
    digits = []
    for channel in channels:
        shade_index = round(min(max(channel, 0.0), 255.0) / step)
        digits.append(f"{round(shade_index * step):02x}")
    return "#" + "".join(digits)
