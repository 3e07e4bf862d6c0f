"""What XLA will do with a run, told before it runs."""
