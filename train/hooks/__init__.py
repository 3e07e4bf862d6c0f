"""The evaluations of a run and what follows from them: the checkpoint of the best step, an early end."""

from .evaluations import Evaluations as Evaluations
from .evaluations import held_out_means as held_out_means
from .evaluations import open_evaluations as open_evaluations
