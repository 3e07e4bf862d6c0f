"""Draws terminal.svg: the terminal after the first command of the README. It trains, which takes a minute or two.

python docs/pictures/terminal.py
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).with_suffix(".svg")
COMMAND = ["train", "jgt:quickstart", "train.log_every=10"]
WIDTH = 110
# rich's own format loads fonts from another server, which a picture in a page may not.
FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: arial; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def printed() -> str:
    """What the command prints, with the escapes of a terminal, in a folder of its own."""
    environment = {**os.environ, "FORCE_COLOR": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jgt", *COMMAND]
        return subprocess.run(
            command, cwd=folder, env=environment, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ).stdout


def draw(text: str) -> str:
    """The picture of a text in a terminal."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    console.print(Text.from_ansi(text.rstrip()))
    return console.export_svg(title=f"jgt {' '.join(COMMAND)}", code_format=FORMAT, unique_id="terminal")


if __name__ == "__main__":
    PICTURE.write_text(draw(printed()))
