"""Everything of a run that exists before its first step. `prepare` (`prepare.py`) makes it, `Setup` (`setup.py`) is it."""

from .fit import compiled_to_fit as compiled_to_fit
from .fit import with_remat as with_remat
from .prepare import prepare as prepare
from .remat import AUTO as AUTO
from .remat import Remat as Remat
from .setup import Setup as Setup
