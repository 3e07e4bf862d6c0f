"""Hardware that need not exist: chips and their links as data, and how long work takes on them.

The YAML files in `chips/` describe what a chip can do, and `chip.py` reads them. `rates.py` turns a kernel's work into seconds, and
`network.py` the bytes that a group of devices sends.
"""

from jgt.planner.hardware.chip import USABLE as USABLE
from jgt.planner.hardware.chip import Target as Target
from jgt.planner.hardware.chip import chip_of as chip_of
from jgt.planner.hardware.chip import parse_target as parse_target
from jgt.planner.hardware.chip import read_prices as read_prices
from jgt.planner.hardware.chip import target_of as target_of
from jgt.planner.hardware.network import Network as Network
