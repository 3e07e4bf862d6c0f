"""The ground floor, with `files`: the sections of a run's file, the values of flags, and code of the user's own, by name."""
