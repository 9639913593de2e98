"""lohan on several GPUs: LoHan V-G, and lohan beside FCDP and Elixir on FCDP's cluster.

What `lohan.wrap` does (_world_wrap) stands beside what is only planned (lab/world_lohan.py), in
columns that say so.

Nothing is fitted here. V-G's server is the preset `paper-4090` with four GPUs, whose constants are
fitted on one GPU (benchmarks/paper_tables.py). LoHan runs a process for each GPU; each of them
reads the parameters that it computes with from the SSDs, and the states are read and written once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import fcdp_tables
import world_cells
from lab import world_lohan, world_policies
from lohan.errors import BudgetError
from lohan.planning import _machines, _plan, _world, _world_lohan, _world_wrap
from lohan.planning._world import Step
from world_cells import Cell

MODEL, GLOBAL_BATCH, GPUS = "gpt-70b", 96, 4
# LoHan's artifact.
MEASURED_TFLOPS = 348.4
TFLOPS_BAR = 0.12
NODES = (2, 4)
NETWORKS = ("rdma", "ipoib", "10gbe", "1gbe")
# Steps that differ by less take the same time: the rate of AdamW on this CPU is not known as well.
TIE = 1e-4
# How much faster than fcdp lohan has to be in full fine-tuning over 10 Gb/s Ethernet.
LEAST_GAINS = {2: 1.6, 4: 1.2}
# Weak scaling: 100 Gb/s between nodes of 8 GPUs, 65,536 tokens for each GPU in a step.
SCALED_NODES = (1, 2, 4, 8, 16, 32, 64, 128)
SCALED_NET_BYTES_PER_S = 12_500_000_000
SCALED_MODEL, SCALED_BATCH = "10B", 64
SCALED_LEAST = 0.9
PLANNED = "planned, not implemented"
DIVIDED, REPLICATED = (_world_wrap.Setting("on", name) for name in ("parameters", "all"))
WRAPPED = [
    one._replace(sum_order=order)
    for one in (DIVIDED, REPLICATED)
    for order in ("sequential", "tree")
]


def several_gpus(options: world_lohan.Options) -> tuple[Step, float]:
    """Return V-G's step with the number of swapped layers that is fastest, and its TFLOP/s."""
    model = _plan.named_model(MODEL, batch=GLOBAL_BATCH // GPUS)
    here = dataclasses.replace(_machines.load("paper-4090"), gpu_count=GPUS)
    tried = (
        world_lohan.step(work, here, options)
        for work in _world_lohan.swaps(model, _world.work_of(model))
    )
    best = min(tried, key=lambda step: step.step_s)
    return best, GPUS * 3 * model.forward_flop / best.step_s / 1e12


def tflops() -> Iterator[Cell]:
    """Yield V-G: TFLOP/s of 70B on four RTX 4090."""
    _, said = several_gpus(world_lohan.PAPER)
    yield Cell("70B, batch 96, 4 GPUs", MEASURED_TFLOPS, said, TFLOPS_BAR)


@dataclasses.dataclass(frozen=True)
class Place:
    """A step on FCDP's cluster."""

    model: str
    nodes: int
    network: str
    is_lora: bool
    batch: int = fcdp_tables.MICRO_BATCH

    def step(self, policy: str, sums: str = "auto") -> Step | None:
        """Return the step of a policy; None if it finds no room on the GPU."""
        work = fcdp_tables.work_of(self.model, self.batch, self.is_lora)
        here = fcdp_tables.machine_of(self.nodes, self.network)
        try:
            return world_policies.step(policy, work, here, sums=sums)
        except BudgetError:
            return None

    def planned_s(self, sums: str) -> float:
        """Return the seconds of the step that is planned for lohan with an order of sums."""
        own = self.step("lohan", sums)
        assert own is not None
        return own.step_s

    def wrapped_s(self) -> float:
        """Return the seconds of a step of lohan.wrap with its fastest setting."""
        work = fcdp_tables.work_of(self.model, self.batch, self.is_lora)
        here = fcdp_tables.machine_of(self.nodes, self.network)
        return min(_world_wrap.step(work, here, setting).step_s for setting in WRAPPED)

    def gain(self, policy: str, own_s: float) -> float:
        """Return how much faster than a policy's step own_s is; 0 if the policy finds no room."""
        other = self.step(policy)
        return other.step_s / own_s if other is not None else 0.0


def planned_gain(place: Place, sums: str) -> float:
    """Return how much faster than fcdp the step is that is planned with an order of sums."""
    return place.gain("fcdp", place.planned_s(sums))


def places(is_lora: bool) -> Iterator[Place]:
    """Yield all models, numbers of nodes and networks, at the batch of V-B."""
    for nodes, network, model in itertools.product(NODES, NETWORKS, fcdp_tables.SHAPES):
        yield Place(model, nodes, network, is_lora)


def sums_of(is_lora: bool) -> tuple[str, ...]:
    """Return the orders of sums with which lohan's plan should not be slower than fcdp."""
    return ("auto", *world_lohan.SUMS) if is_lora else ("node16",)


def gains_table(is_lora: bool, sums: str, policies: tuple[str, ...]) -> str:
    """Format the least and the largest gain over the models, by number of nodes and network.

    Args:
        is_lora: whether adapters are trained, or all parameters.
        sums: the order of sums of the planned columns.
        policies: those that lohan is compared with.
    """

    def gains(policy: str, here: list[Place], own_s: list[float]) -> str:
        found = [place.gain(policy, each) for place, each in zip(here, own_s, strict=True)]
        run = [gain for gain in found if gain]
        return f"{min(run):.2f} to {max(run):.2f}" if run else "out of memory"

    def rows() -> Iterator[list[str]]:
        for nodes, network in itertools.product(NODES, NETWORKS):
            here = [Place(model, nodes, network, is_lora) for model in fcdp_tables.SHAPES]
            wrapped = [place.wrapped_s() for place in here]
            planned = [place.planned_s(sums) for place in here]
            cells = [gains(policy, here, own) for own in (wrapped, planned) for policy in policies]
            yield [str(nodes), network, *cells]

    heads = (*policies, *(f"{PLANNED}: {policy}" for policy in policies))
    return world_cells.markdown("|".join(("nodes", "network", *heads)), rows())


def scaled_step(policy: str | _world_wrap.Setting, nodes: int) -> Step:
    """Return the step of a policy, or of a setting of wrap(), on nodes with a fast network."""
    work = fcdp_tables.work_of(SCALED_MODEL, SCALED_BATCH, False)
    here = dataclasses.replace(
        fcdp_tables.machine_of(nodes, "rdma"), net_bytes_per_s=SCALED_NET_BYTES_PER_S
    )
    if isinstance(policy, _world_wrap.Setting):
        return _world_wrap.step(work, here, policy)
    sums = "exact" if policy == "lohan" else "auto"
    return world_policies.step(policy, work, here, sums=sums)


def efficiency(policy: str | _world_wrap.Setting, nodes: int) -> float:
    """Return the time of a step on one node over that on several, each GPU with as much work."""
    return scaled_step(policy, 1).step_s / scaled_step(policy, nodes).step_s


SCALED = {
    "`zero3`": "zero3",
    "`fcdp`": "fcdp",
    f"`{DIVIDED}`": DIVIDED,
    f"`{REPLICATED}`": REPLICATED,
    PLANNED: "lohan",
}


def scaling_table() -> str:
    """Format the efficiencies by number of GPUs."""
    gpus = fcdp_tables.machine_of(1, "rdma").gpu_count

    def rows() -> Iterator[list[str]]:
        for nodes in SCALED_NODES:
            found = [f"{efficiency(policy, nodes):.2f}" for policy in SCALED.values()]
            yield [f"{nodes * gpus:,}", *found]

    return world_cells.markdown("|".join(("GPUs", *SCALED)), rows())


TEXT = """\
The server is `paper-4090` with four GPUs, and nothing is fitted. Each of LoHan's processes reads
the parameters that it computes with from the SSDs: 2P G in each pass, besides the states.
"""
OWN_TEXT = """\
With one memory for all GPUs of the node, the parameters are read once. With this, 12 bytes written
and 10 read for a parameter's states, and deferred updates, a plan (benchmarks/lab/world_lohan.py)
has {own:.0f} TFLOP/s. lohan has not run on several GPUs.
"""
VERSUS_TEXT = """\
How much faster a step is than that of each policy (below 1: slower), from the least to the largest
over GPT-10B to GPT-30B, 8 GPUs a node and micro-batches of 8, as in FCDP V-B. All of it is
calculated. The first columns are what `lohan.wrap` does with `Parallel(share=True)` and the fastest
choice of `shard_optimizer=` and `sum_order=`: with `sum_order="tree"` a node sends the sum of its
GPUs' gradients, in fp32. The columns headed "planned, not implemented" have equal shards of states
and updates that overlap with the next forward, and may round these sums to 16 bits, which no
setting of `lohan.wrap` does. Steps do not have to fit the GPU here, so that all policies can be
compared.
"""
SCALING_TEXT = """\
The time of a step on one node over that on several, with as much work for each GPU: GPT-10B, full
fine-tuning, 64 samples of 1,024 tokens for each GPU, and 100 Gb/s between nodes of 8 GPUs.
Calculated as above, not simulated. The columns with settings are what `lohan.wrap` does with them;
the last one is a plan with exact sums, each node with an equal shard of states. Where states
are divided, each node updates fewer of them the more nodes there are, so that a step may be shorter
than on one node. With whole replicas each node sends its gradients to every other one: use them on
two nodes, or with adapters.
"""
LORA_TEXT = """\
LoRA of rank 8. The planned columns have `sums="auto"`, which means `node` for 8 GPUs a node. FCDP
sends 3.75 bytes of an adapter's parameter on two nodes, the plan 3 with `node` and 2 with `node16`.
With `exact` it sends 9, with `rank` 17, none of which is hidden: the adapters are one unit,
exchanged after backward. These two, which `auto` does not choose here, are slower than FCDP over
Ethernet. With RDMA both take the same time: the plan is slower by 0.1 ms of 6.6 s, in which the CPU
updates the adapters.
"""


def parts() -> Iterator[str]:
    """Yield the tables and their explanations, for docs/paper-results.md."""
    yield "## LoHan on four GPUs, TFLOP/s (LoHan V-G)\n"
    yield TEXT
    yield world_cells.table(tflops())
    _, own = several_gpus(world_lohan.Options(is_on_ssd=True))
    yield OWN_TEXT.format(own=own)
    yield "## lohan against the papers' policies on FCDP's cluster\n"
    yield VERSUS_TEXT
    yield "Full fine-tuning; the planned sums are in 16 bits (`node16`), as in the rings:\n"
    yield gains_table(False, "node16", ("zero3", "zeropp", "fcdp", "elixir"))
    yield "Weak scaling to 1,024 GPUs:\n"
    yield SCALING_TEXT
    yield scaling_table()
    yield LORA_TEXT
    yield world_cells.markdown(
        f"sums, {PLANNED}|the least gain against fcdp, over models, nodes and networks",
        (
            [sums, f"{min(planned_gain(place, sums) for place in places(True)):.3f}"]
            for sums in sums_of(True)
        ),
    )
    yield gains_table(True, "auto", ("zero3", "zeropp", "fcdp-comm", "fcdp"))


def checks() -> Iterator[tuple[str, bool]]:
    """Yield each check with its result."""
    for cell in tflops():
        yield f"LoHan V-G: {cell}", cell.holds
    for is_lora in (False, True):
        for sums in sums_of(is_lora):
            least, place = min(
                ((planned_gain(place, sums), place) for place in places(is_lora)),
                key=lambda found: found[0],
            )
            what = f"{'LoRA' if is_lora else 'full'}, {sums}"
            where = f"{place.model}, {place.nodes} nodes, {place.network}"
            yield (
                f"lohan's plan against fcdp, {what}: at least {least:.3f}x ({where})",
                least >= 1 - TIE,
            )
    for nodes, bar in LEAST_GAINS.items():
        least = min(
            planned_gain(place, "node16")
            for place in places(False)
            if (place.nodes, place.network) == (nodes, "10gbe")
        )
        yield (
            f"lohan's plan against fcdp, full, 10gbe, {nodes} nodes: {least:.2f}x"
            f" (at least {bar}x)",
            least >= bar,
        )
    for policy in ("lohan", DIVIDED):
        least = min(efficiency(policy, nodes) for nodes in SCALED_NODES)
        yield (
            f"weak scaling to 1,024 GPUs, {policy}: at least {least:.2f} (at least {SCALED_LEAST})",
            least >= SCALED_LEAST,
        )
