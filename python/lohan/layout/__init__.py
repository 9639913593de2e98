"""The layout of a model's parameters in blocks and units, and in files of other programs."""

# The attribute of a module that must not be divided into several blocks.
IS_BLOCK = "_lohan_is_block"
