"""How moments are stored; without torch, so that plans need not import it."""

# In the order of the core's enum lh_adam_states, with the bytes per element of each of the two
# moments; csrc/compute/adam_states.h describes the formats.
STATES = {"fp32": 4, "bf16": 2, "8bit": 1}
# 8-bit moments: the elements that share a byte of scales.
SCALED_ELEMENTS = 16
# The elements of a block, and what is stored of each: scales of 8-bit moments, or second moments of
# rows (struct lh_adam_scales and struct lh_adam_rows in csrc/compute/adam_states.h).
BLOCK_ELEMENTS = 64
SCALE_BYTES = BLOCK_ELEMENTS // SCALED_ELEMENTS
ROW_BYTES = 8
