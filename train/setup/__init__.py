"""Everything of a run that exists before its first step. `prepare` (`prepare.py`) makes it, `Setup` (`setup.py`) is it."""

from .prepare import prepare as prepare
from .remat import AUTO as AUTO
from .remat import Remat as Remat
from .setup import Setup as Setup
