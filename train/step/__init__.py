"""One training step, as pure functions: the loss, its gradient, the optimizer's update. Start with `step.py`."""
