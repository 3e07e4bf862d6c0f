"""`picture`: which device holds which part of which tensor, as text and as an SVG.

Tensors that are split in the same way are one grid: a cell for each part, with the numbers of the devices that hold it. Rows are the parts
of the first dims that are split, columns those of the last one. Devices in one cell hold copies. Below the grid are the tensors, each with
its dims, their axes, the bytes on a device and the padding.
"""

from __future__ import annotations

import colorsys
import html
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jgt.command.console import Console, amount
from jgt.document import InputError
from jgt.program.dims import num_parts, sharding_dims
from jgt.replacements.replacement import ParameterPlace
from jgt.sharding.inputs import named_leaves, path_text
from jgt.sharding.placement import Placement
from jgt.sharding.sharded import Sharded

_MOST = 16
"""The rows and the columns of a grid that are shown."""
_CELL, _LINE, _CHAR, _LEFT = 30, 20, 7.3, 12
"""The sizes of the SVG in pixels: the height of a cell, that of a line of text, the width of a character, and the margin."""


@dataclass(frozen=True, kw_only=True)
class PartGrid:
    """The parts of tensors that are split in the same way.

    axes: the mesh axes of the rows and of the columns.
    devices: by row and column, the numbers of the devices that hold the part.
    tensors: path, dims with their axes, bytes on a device, and padding of each tensor.
    """

    axes: tuple[tuple[str, ...], tuple[str, ...]]
    devices: tuple[tuple[tuple[int, ...], ...], ...]
    tensors: tuple[tuple[str, str, str, str], ...]

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of rows and of columns."""
        return len(self.devices), len(self.devices[0])

    @property
    def title(self) -> str:
        """A line about the parts: `2 x 4 parts over fsdp x tensor, 1 copy of each`."""
        (rows, columns), copies = self.size, len(self.devices[0][0])
        over = [(f"{size}", "+".join(axes)) for size, axes in zip((rows, columns), self.axes, strict=True) if axes]
        if not over:
            return f"whole on each of {copies} devices"
        sizes, names = (" x ".join(texts) for texts in zip(*over, strict=True))
        cut = f"; the first {min(rows, _MOST)} x {min(columns, _MOST)} are shown" if max(rows, columns) > _MOST else ""
        return f"{sizes} parts over {names}, {f'{copies} copies' if copies > 1 else '1 copy'} of each{cut}"

    def cells(self) -> list[list[tuple[str, str]]]:
        """The text and the colour of each cell. A part has one colour; of a large grid the first rows and columns are there."""
        rows, columns = self.size
        return [
            [(_ranges(ids), _colour((r * columns + c) / (rows * columns))) for c, ids in enumerate(row[:_MOST])]
            for r, row in enumerate(self.devices[:_MOST])
        ]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture of tensors on a mesh. `print` shows it as text, a notebook as SVG; `show` prints it in colours."""

    mesh: Mesh | AbstractMesh
    grids: tuple[PartGrid, ...]

    def __str__(self) -> str:
        return "\n".join("".join(text for text, _ in line) for line in self._lines())

    def show(self) -> None:
        """Prints the picture, on a terminal in colours."""
        Console().print(Console.styled(self._lines()))

    @property
    def title(self) -> str:
        """The mesh: its axes, and the number of devices."""
        return " x ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items()) + f" = {self.mesh.size} devices"

    def _lines(self) -> Iterator[list[tuple[str, str]]]:
        yield [(self.title, "bold")]
        for grid in self.grids:
            yield [("", "")]
            yield [(grid.title, "bold")]
            cells = grid.cells()
            width = max(len(text) for row in cells for text, _ in row)
            for row in cells:
                yield [("  ", ""), *((f"[{text:^{width}}]", f"black on {colour}") for text, colour in row)]
            widths = [max(map(len, column)) for column in zip(*grid.tensors, strict=True)]
            for texts in grid.tensors:
                yield [("    " + "  ".join(text.ljust(width) for text, width in zip(texts, widths, strict=True)).rstrip(), "")]

    @property
    def svg(self) -> str:
        """The picture as an SVG."""
        parts, top, right = [_text(_LEFT, _LINE, self.title, bold=True)], _LINE + 16.0, len(self.title) * _CHAR
        for grid in self.grids:
            parts.append(_text(_LEFT, top + 14, grid.title, bold=True))
            top, cells = top + 22, grid.cells()
            width = max(34.0, max(len(text) for row in cells for text, _ in row) * _CHAR + 12)
            for r, c, (text, colour) in ((r, c, cell) for r, row in enumerate(cells) for c, cell in enumerate(row)):
                x, y = _LEFT + c * width, top + r * _CELL
                parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_CELL}" fill="{colour}" stroke="#fff"/>')
                parts.append(_text(x + width / 2, y + 20, text, anchor="middle"))
            top += len(cells) * _CELL + 4
            widths = (max(map(len, column)) * _CHAR + 18 for column in zip(*grid.tensors, strict=True))
            columns = list(itertools.accumulate(widths, initial=_LEFT))
            for n, texts in enumerate(grid.tensors):
                parts += [_text(x, top + 14 + n * _LINE, text) for x, text in zip(columns, texts, strict=False)]
            top += len(grid.tensors) * _LINE + 18
            right = max(right, columns[-1], len(grid.title) * _CHAR, len(cells[0]) * width)
        size = f'width="{right + 2 * _LEFT:.0f}" height="{top:.0f}"'
        font = 'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>'

    def _repr_svg_(self) -> str:
        return self.svg


def picture(of: Any, *args: Any, **kwargs: Any) -> Picture:
    """Which device holds which part of which tensor.

        print(jgt.picture(jgt.shard(loss, rules, mesh), params, batch))

    of: a sharded function, whose parameters are shown; a `Placement`; or a tree of arrays, or of ShapeDtypeStructs, on one mesh.
    args, kwargs: the arguments of a call of the sharded function.

    Raises InputError for a tree without a mesh or on several ones, and as a call of the sharded function does.
    """
    placement = cast("Sharded[..., Any]", of).placement(*args, **kwargs) if isinstance(of, Sharded) else cast(object, of)
    if isinstance(placement, Placement):
        return _picture(placement.mesh, placement.parameters)
    placed = [(path_text(path) or "(itself)", x, getattr(x, "sharding", None)) for path, x in named_leaves(cast(object, of))[0]]
    meshes = {sharding.mesh for _, _, sharding in placed if isinstance(sharding, NamedSharding)}
    if len(meshes) != 1 or not all(isinstance(sharding, NamedSharding) for _, _, sharding in placed):
        what = "on several meshes" if len(meshes) > 1 else "on no mesh"
        raise InputError([f"picture: arrays {what}. Give a sharded function and its arguments, a Placement, or arrays on one mesh"])
    return _picture(meshes.pop(), [_place(path, x, cast(NamedSharding, sharding)) for path, x, sharding in placed])


def _place(path: str, x: Any, sharding: NamedSharding) -> ParameterPlace:
    dims = sharding_dims(sharding, len(x.shape))
    return ParameterPlace(path=path, shape=x.shape, dtype=x.dtype, signals=(), dims=dims, optimizer_dims=dims)


def _picture(mesh: Mesh | AbstractMesh, places: Iterable[ParameterPlace]) -> Picture:
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[tuple[str, str, str, str]]] = {}
    for place in places:
        groups.setdefault(_grid_axes(place, mesh), []).append(_row(place, mesh))
    # Those in the most parts first.
    ordered = sorted(groups.items(), key=lambda group: -num_parts((*group[0][0], *group[0][1]), mesh.shape))
    return Picture(
        mesh=mesh, grids=tuple(PartGrid(axes=axes, devices=_devices(mesh, *axes), tensors=tuple(rows)) for axes, rows in ordered)
    )


def _grid_axes(place: ParameterPlace, mesh: Mesh | AbstractMesh) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of the rows and of the columns. A single dim that is split is rows, unless it is the last one."""
    used = [tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1) for axes in place.dims]
    split = [dim for dim, axes in enumerate(used) if axes]
    columns = split[-1:] if len(split) > 1 or split == [len(used) - 1] else []
    return tuple(axis for dim in split if dim not in columns for axis in used[dim]), tuple(axis for dim in columns for axis in used[dim])


def _devices(mesh: Mesh | AbstractMesh, rows: Sequence[str], columns: Sequence[str]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    ids = [device.id for device in mesh.devices.flat] if isinstance(mesh, Mesh) else range(mesh.size)
    held: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    for place, number in zip(itertools.product(*map(range, mesh.shape.values())), ids, strict=True):
        at = dict(zip(mesh.axis_names, place, strict=True))
        row, column = (tuple(at[axis] for axis in axes) for axes in (rows, columns))
        held.setdefault(row, {}).setdefault(column, []).append(number)
    return tuple(tuple(tuple(cells[column]) for column in sorted(cells)) for _, cells in sorted(held.items()))


def _row(place: ParameterPlace, mesh: Mesh | AbstractMesh) -> tuple[str, str, str, str]:
    dims = [f"{size}{f'/{chr(43).join(axes)}' if axes else ''}" for size, axes in zip(place.shape, place.dims, strict=True)]
    stored = math.prod(-(-size // (n := num_parts(axes, mesh.shape))) * n for size, axes in zip(place.shape, place.dims, strict=True))
    padding = stored / max(math.prod(place.shape), 1) - 1
    size = f"{amount(place.bytes_per_device(mesh), 'B')} a device"
    return place.path or "(itself)", " x ".join(dims) or "scalar", size, f"{padding:.1%} padding" if padding > 0 else ""


def _ranges(ids: Iterable[int]) -> str:
    """Numbers in order, with runs as ranges: `0-3,8`."""
    runs = itertools.groupby(enumerate(sorted(ids)), key=lambda pair: pair[1] - pair[0])
    ends = [(members[0][1], members[-1][1]) for members in (list(run) for _, run in runs)]
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ends)


def _colour(hue: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, 0.78, 0.65))


def _text(x: float, y: float, text: str, *, bold: bool = False, anchor: str = "start") -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{html.escape(text)}</text>'
