"""The order of micro-batches that order="auto" chooses.

[Note: The choice of the order] Let a step have k micro-batches. P are the bytes of the parameters
where the model computes, and M the bytes of them that have room there. A forward and a backward
that follow each other bring in

    R = 2 max(P - M, 0)

bytes at least, since each visits all blocks. The horizontal order brings in k R, the vertical one
R; states and gradients move once a step in both (GreedySnake, arXiv 2512.17570). One micro-batch
keeps A bytes for its backward: the inputs of blocks, and, unless they are recomputed, what
operations save. The horizontal order keeps A bytes at once, the vertical one k A. So "auto" takes
the vertical order if R > 0, which is known when the model is wrapped, and if

    k A <= F / 2 + S

where F is the free memory where the model computes, and S the room for offloaded activations
(swap_bytes, swap_ssd_bytes). The first call of accumulate() runs in the horizontal order, counts
k A, and decides. Half of F is left for temporaries and for larger batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lohan import _core
from lohan.activations import _swap

if TYPE_CHECKING:
    from lohan.config import Config
    from lohan.layout._block import Layout
    from lohan.session._training import Training
    from lohan.torch_glue._device import Device


def why_no_turns() -> str:
    """Return why this build of torch cannot run micro-batches in turns, or "" if it can."""
    try:
        _core.sequence_peek()
    except NotImplementedError as error:
        return str(error)
    return ""


def is_vertical(config: Config, layout: Layout, budget: dict[str, int], device: Device) -> bool:
    """Return whether the session is to be able to run micro-batches in the vertical order."""
    if config.order != "auto":
        return config.order == "vertical"
    is_alone = config.process_count == 1 and config.sharers == 1
    if config.has_policy or not config.sums_gradients or not is_alone or why_no_turns():
        return False
    room = budget["region_bytes"] if device.name == "cpu" else device.slot_bytes
    return int(room) < sum(unit.place_bytes for unit in layout.units)


def fits(session: Training, kept_bytes: int) -> bool:
    """Return whether all micro-batches may keep this at once: [Note: The choice of the order]."""
    memory, _, store, _ = session.saving.options
    return kept_bytes <= _free_bytes(session) // 2 + memory + _swap.room_bytes(store)


def _free_bytes(session: Training) -> int:
    """Return the free memory where the model computes, when no forward keeps anything."""
    if session.saving.meter is not None:
        return session.saving.meter.room()
    device = session.device.torch_device
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    return int(_core.build_info()["memory_available_bytes"])
