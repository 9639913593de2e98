"""The policies of several GPUs and nodes by name, and the fastest of them that fits a machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lohan.errors import BudgetError, MachineError

from lab import world_elixir, world_lohan, world_rings

if TYPE_CHECKING:
    from lohan.planning._machines import Machine
    from lohan.planning._world import Step, Work

NAMES = (*world_rings.NAMES, "zero3-offload", "elixir", "lohan", "auto")


def step(
    policy: str, work: Work, machine: Machine, *, tau: float = world_rings.TAU, sums: str = "auto"
) -> Step:
    """Return the bytes, the memory and the time of a policy's step, whether or not it fits.

    Args:
        policy: one of NAMES.
        work: what each GPU computes.
        machine: the machine, with node_count nodes of gpu_count GPUs.
        tau: the share of the GPU's memory up to which `fcdp` keeps parameters on it.
        sums: the order in which `lohan` and `auto` add gradients (world_lohan).

    Raises:
        MachineError: the policy or sums is unknown, or the machine does not define a link between
            its nodes.
        BudgetError: Elixir's search finds no room on the GPU.
    """
    if machine.node_count > 1 and not machine.net_bytes_per_s:
        raise MachineError(
            f"node_count = {machine.node_count}, but net_bytes_per_s is 0: set the rate of a"
            " node's network card"
        )
    if sums not in ("auto", *world_lohan.SUMS):
        raise MachineError(f"sums {sums!r}: must be auto or one of {', '.join(world_lohan.SUMS)}")
    if policy in world_rings.NAMES:
        return world_rings.step(policy, work, machine, tau)
    try:
        if policy == "elixir":
            return world_elixir.step(work, machine)
    except ValueError as error:
        raise BudgetError(f"elixir: {error}: take a smaller batch") from error
    if policy == "zero3-offload":
        return world_elixir.zero3_offload(work, machine)
    options = world_lohan.Options(sums=sums)
    if policy == "lohan":
        return world_lohan.step(work, machine, options)
    if policy == "auto":
        return world_lohan.auto(work, machine, options)
    raise MachineError(f"policy {policy!r}: must be one of {', '.join(NAMES)}")


def fastest(work: Work, machine: Machine) -> list[Step]:
    """Return the steps of all policies that fit the machine, the fastest one first."""
    found = []
    for policy in NAMES:
        try:
            found.append(step(policy, work, machine))
        except BudgetError:
            continue
    return sorted((one for one in found if one.fits(machine)), key=lambda one: one.step_s)
