"""Draws docs/pictures/rooms.svg: the rooms of jgt and train, and who imports whom. Run it after a change of imports.

    python docs/pictures/rooms.py            # writes the picture
    python docs/pictures/rooms.py --check    # exit code 1 if it is out of date

A room is a folder, or a file beside the folders. It is drawn one floor above the highest room that it imports, so every arrow points down.
An import cycle is an error. Modules that are loaded by a string count as imports. Arrows to the rooms that almost every room imports are
left out, because they would hide the others. The wings of train are the rooms that no other room imports; the other rooms are its trunk.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PICTURE = Path(__file__).with_suffix(".svg")
EVERYWHERE = ("document", "console", "signal", "settings")
WINGS = ("watch", "plan", "doctor")
"""The rooms of train that no room of the trunk imports: the table of commands reaches them."""
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 132, 46, 22, 44, 24

STYLE = """
  svg { font: 13px system-ui, sans-serif; }
  .room rect { fill: #eef2f7; stroke: #8aa0b8; }
  .room text { fill: #1b2733; text-anchor: middle; }
  .wing rect { stroke-dasharray: 4 3; }
  .room .lines { fill: #5c6f82; font-size: 11px; }
  .arrow { stroke: #9db0c3; stroke-width: 1.2; fill: none; }
  marker path { fill: #9db0c3; }
  .package { fill: #5c6f82; font-weight: 600; }
  @media (prefers-color-scheme: dark) {
    .room rect { fill: #1d2733; stroke: #52667a; }
    .room text { fill: #e6edf3; }
    .room .lines, .package { fill: #93a5b8; }
    .arrow { stroke: #4a5d70; }
    marker path { fill: #4a5d70; }
  }
"""


@dataclass(frozen=True, kw_only=True)
class Room:
    """A folder or file of a package, the lines in it, and the rooms of the same package that it imports."""

    name: str
    lines: int
    imports: frozenset[str]


def rooms_of(package: str) -> dict[str, Room]:
    """The rooms of a package, by name. Faces that only name things, `__init__` and `__main__`, are left out."""
    files: dict[str, list[Path]] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT / package).with_suffix("").parts
        if parts[0] not in ("__init__", "__main__"):
            files.setdefault(parts[0], []).append(path)
    rooms: dict[str, Room] = {}
    for name, paths in files.items():
        found = {imported for path in paths for imported in imports_of(path, package)}
        wanted = frozenset(found & set(files)) - {name, *EVERYWHERE}
        rooms[name] = Room(name=name, lines=sum(len(path.read_text().splitlines()) for path in paths), imports=wanted)
    return rooms


def imports_of(path: Path, package: str) -> Iterator[str]:
    """The rooms of a package that a file imports."""
    yield from (parts[1] for name in modules_of(path) if (parts := name.split("."))[0] == package and len(parts) > 1)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which is parsed once."""
    return ast.parse(path.read_text())


@functools.cache
def modules_of(path: Path) -> frozenset[str]:
    """The modules that a file imports, at the top or inside a function, by a statement or by a string.

    `from a import b` counts as a and a.b. A string counts where it is the argument of `import_module` or of `trainer` (a module of the
    trainer), or follows "-m", or is code for another process with such calls and imports in it.
    """
    return frozenset(name for node in ast.walk(tree_of(path)) for name in _names_in(node, path.relative_to(ROOT).parts))


def _names_in(node: ast.AST, parts: tuple[str, ...]) -> Iterator[str]:
    """The modules that a node of a file with these parts in its path imports."""
    if isinstance(node, ast.ImportFrom):
        # The trainer's own imports are relative.
        above = parts[: -node.level] if node.level else ()
        module = ".".join([*above, *([node.module] if node.module else [])])
        yield from (module, *(f"{module}.{alias.name}" for alias in node.names))
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
        called, name = getattr(node.func, "attr", getattr(node.func, "id", "")), node.args[0].value
        if called == "import_module":
            yield ".".join(parts[: -(len(name) - len(name.lstrip(".")))]) + f".{name.lstrip('.')}" if name.startswith(".") else name
        elif called == "trainer":
            yield f"train.{name}"
    elif isinstance(node, ast.List):
        texts = [item.value if isinstance(item, ast.Constant) else None for item in node.elts]
        yield from (after for option, after in itertools.pairwise(texts) if option == "-m" and isinstance(after, str))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ("import " in node.value or "trainer(" in node.value):
        with contextlib.suppress(SyntaxError):
            yield from (name for inner in ast.walk(ast.parse(node.value)) for name in _names_in(inner, parts))


def floors_of(rooms: dict[str, Room]) -> list[list[str]]:
    """Rooms by floor, the ground floor first. Raises graphlib.CycleError for a circle of imports."""
    floor: dict[str, int] = {}
    for name in TopologicalSorter({name: room.imports for name, room in rooms.items()}).static_order():
        floor[name] = 1 + max((floor[other] for other in rooms[name].imports), default=-1)
    floors: list[list[str]] = [[] for _ in range(max(floor.values()) + 1)]
    for name in sorted(floor):
        floors[floor[name]].append(name)
    return [_near_what_they_import(names, rooms, floors[:index]) for index, names in enumerate(floors)]


def _near_what_they_import(names: list[str], rooms: dict[str, Room], below: list[list[str]]) -> list[str]:
    """A floor ordered so that its arrows cross little: by the mean position of what each room imports."""
    at = {name: index / max(len(floor) - 1, 1) for floor in below for index, name in enumerate(floor)}
    # Sets have no order, and floats that are added in another order may differ in their last bits.
    mean = {name: round(sum(at[i] for i in rooms[name].imports) / max(len(rooms[name].imports), 1), 6) for name in names}
    return sorted(names, key=lambda name: (mean[name], name))


def draw(package: str, top: int, width: int, floors: list[list[str]], rooms: dict[str, Room]) -> Iterator[str]:
    """The SVG elements of one package, in a strip of this width that begins at `top`."""
    bottom = top + height_of(floors)
    places: dict[str, tuple[float, float]] = {}
    for index, floor in enumerate(floors):
        start = (width - len(floor) * (WIDTH + GAP_X) + GAP_X) / 2
        for column, name in enumerate(floor):
            places[name] = (start + column * (WIDTH + GAP_X), bottom - HEIGHT - index * (HEIGHT + GAP_Y))
    yield f'<text class="package" x="{MARGIN}" y="{top + 18}">{package}/</text>'
    for name, room in rooms.items():
        for other in sorted(room.imports):
            (x, y), (to_x, to_y) = places[name], places[other]
            start, end, bend = x + WIDTH / 2, to_x + WIDTH / 2, GAP_Y * 0.8
            path = (
                f"M{start:.0f} {y + HEIGHT:.0f} C{start:.0f} {y + HEIGHT + bend:.0f} {end:.0f} {to_y - bend:.0f} {end:.0f} {to_y - 4:.0f}"
            )
            yield f'<path class="arrow" marker-end="url(#head)" d="{path}"/>'
    for name, (x, y) in places.items():
        kind = "room wing" if package == "train" and name in WINGS else "room"
        yield f'<g class="{kind}"><rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        yield f'<text x="{x + WIDTH / 2:.0f}" y="{y + 20:.0f}">{name}</text>'
        yield f'<text class="lines" x="{x + WIDTH / 2:.0f}" y="{y + 36:.0f}">{max(100, round(rooms[name].lines, -2)):,} lines</text></g>'


def height_of(floors: list[list[str]]) -> int:
    """The height of a package's strip."""
    return len(floors) * (HEIGHT + GAP_Y) - GAP_Y


def picture() -> str:
    """The whole picture as SVG, in light and dark colours by the reader's setting."""
    packages = {package: rooms_of(package) for package in ("train", "jgt")}
    floors = {package: floors_of(rooms) for package, rooms in packages.items()}
    width = 2 * MARGIN - GAP_X + (WIDTH + GAP_X) * max(len(floor) for package in floors.values() for floor in package)
    body: list[str] = []
    top = MARGIN
    for package, rooms in packages.items():
        body += draw(package, top, width, floors[package], rooms)
        top += height_of(floors[package]) + 2 * MARGIN
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0 8 4 0 8z"/></marker>'
    )
    title = "<title>The rooms of jgt and train, the wings of train dashed. An arrow points from a room to one that it imports.</title>"
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}">'
    return "\n".join([opening, title, f"<style>{STYLE}</style>", f"<defs>{head}</defs>", *body, "</svg>", ""])


def main() -> int:
    """Writes the picture, or compares it."""
    drawn = picture()
    if "--check" in sys.argv[1:]:
        return 0 if PICTURE.exists() and PICTURE.read_text() == drawn else 1
    PICTURE.write_text(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
