"""A run's YAML file, without JAX: `config.py` has its sections, `load.py` reads it, `problems.py` and `sync.py` check it as a whole."""

from .config import OWN as OWN
from .config import Config as Config
from .config import Run as Run
from .load import load as load
from .load import rules_document as rules_document
from .problems import batch_problems as batch_problems
from .problems import without_effect as without_effect
from .sync import replica_problems as replica_problems
