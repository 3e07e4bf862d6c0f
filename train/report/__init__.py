"""`python -m train.report RUN`: where a run's wall time went, from its events files. Nothing here imports JAX or numpy."""
