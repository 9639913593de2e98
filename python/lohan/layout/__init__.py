"""The layout of a model's parameters in blocks and units, and in files of other programs."""
