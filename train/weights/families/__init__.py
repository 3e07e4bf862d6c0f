"""The families of published models, as rows: the options that a config.json means, and the names of tensors."""
