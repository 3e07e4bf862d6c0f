"""Measurements that anyone can run again; see each module's docstring for the command."""
