"""The states of torch's generators."""

from __future__ import annotations

import torch


def random_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of torch's generators: the CPU's, and the GPU's if the device is one."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_random_states(states: list[torch.Tensor], device: torch.device) -> None:
    """Restore states that random_states() returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
