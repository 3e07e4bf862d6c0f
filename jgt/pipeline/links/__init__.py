"""Links between devices: where the values of a pipeline are, how they move, and what stages send to one another."""
