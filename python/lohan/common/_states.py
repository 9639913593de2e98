"""How moments are stored; without torch, so that plans need not import it."""

# In the order of the core's enum lh_adam_states, with the bytes per element of each array of
# moments; csrc/compute/adam_states.h describes the formats.
STATES = {"fp32": 4, "bf16": 2, "8bit": 1, "4bit": 1}
# Formats with scales.
SCALED = ("8bit", "4bit")
# The one whose two moments are in one array.
PAIRED = "4bit"
# The elements that share a byte of scales.
SCALED_ELEMENTS = 16
# The elements of a block, and what is stored of each: scales of moments, or second moments of
# rows (struct lh_adam_scales and struct lh_adam_rows in csrc/compute/adam_states.h).
BLOCK_ELEMENTS = 64
SCALE_BYTES = BLOCK_ELEMENTS // SCALED_ELEMENTS
ROW_BYTES = 8
