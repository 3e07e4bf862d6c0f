"""Everything of a run that exists before its first step. `prepare` (`program.py`) makes it, `Setup` (`setup.py`) is it."""

from .program import prepare as prepare
from .setup import Setup as Setup
