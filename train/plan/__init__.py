"""`jgt plan`: what a run will cost, on hardware that need not be here."""
