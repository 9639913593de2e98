"""How a model's parameters lie in blocks and units, and in the files of other programs."""
