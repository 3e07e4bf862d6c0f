"""Pipelines: schedules as tables of integers, and one executor that runs them all in one SPMD program."""
