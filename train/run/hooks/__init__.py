"""Consequences of the steps and evaluations of a run: calls of the user's own code, alerts, the best checkpoint, an early end."""

from .alerts import Alerts as Alerts
from .evaluations import EVENT as EVENT
from .evaluations import Evaluations as Evaluations
from .evaluations import held_out_means as held_out_means
from .evaluations import made_at as made_at
from .evaluations import open_evaluations as open_evaluations
from .hooks import Hook as Hook
from .hooks import HookError as HookError
from .hooks import Hooks as Hooks
from .hooks import open_hooks as open_hooks
