"""Commands that use a model: `jgt generate`, `jgt eval`, `jgt inspect` and `jgt export`."""
