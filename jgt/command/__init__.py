"""The command line `jgt COMMAND`: its commands, their flags, and what completes them in a shell."""
