"""`jgt plan`: what a run will cost, on hardware that need not exist. `__main__.py` is the command."""
