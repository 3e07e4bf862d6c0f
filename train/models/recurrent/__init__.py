"""Linear attention: the layer, and the recurrence that it computes in chunks."""
