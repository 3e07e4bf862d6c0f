"""Commands that use a model: `jgt generate`, `jgt eval` and `jgt export`."""
