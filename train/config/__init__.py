"""A run's YAML file: `config.py` has its sections and what belongs to them, `load.py` reads it and checks it as a whole. No JAX."""

from .config import OWN as OWN
from .config import Config as Config
from .config import Run as Run
from .load import batch_problems as batch_problems
from .load import load as load
from .load import rules_document as rules_document
from .sync import replica_problems as replica_problems
