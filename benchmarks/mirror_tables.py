"""Weak and strong scaling to 1,024 GPUs: lohan's engines in a mirror, and the rings' policies.

    python benchmarks/mirror_tables.py [--jobs N]

The engines of one node run in virtual time, and all other nodes are its images
(lab/mirror.py). The other columns are calculated, as in the sections above.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor

import fcdp_tables
import world_cells
from lab import mirror, world_policies
from lohan.planning import _plan, _world, _world_wrap
from lohan.planning._machines import Machine

NODES = (1, 2, 4, 8, 16, 32, 64, 128)
NET_BYTES_PER_S = 12_500_000_000  # 100 Gb/s
NET_LATENCY_NS = 5_000
MODEL = "10B"
# Weak scaling: 65,536 tokens of 1,024 for each GPU. Strong scaling: 4,194,304 tokens in all.
WEAK_BATCH = 64
STRONG_SAMPLES = 4096
# The most sequences of a micro-batch.
BATCH_MAX = 64
LEAST = 0.9
CALCULATED = ("divided", "ddp", "zero2", "zero3", "hsdp", "fcdp")
PLANNED = "planned, not implemented"


def machine_of(nodes: int) -> Machine:
    """Return FCDP's cluster with this many nodes and a fast network."""
    return dataclasses.replace(
        fcdp_tables.machine_of(nodes, "rdma"),
        net_bytes_per_s=NET_BYTES_PER_S,
        net_latency_ns=NET_LATENCY_NS,
    )


def model_of(batch: int) -> _plan.Model:
    """Return the model at the batch of one GPU."""
    layers, hidden = fcdp_tables.SHAPES[MODEL]
    return _plan.decoder(
        MODEL,
        layers=layers,
        hidden=hidden,
        vocab=fcdp_tables.VOCAB,
        seq=fcdp_tables.SEQ,
        batch=batch,
    )


@dataclasses.dataclass(frozen=True)
class Load:
    """The part of one GPU of a step: micro-batches of this many sequences."""

    batch: int
    micro_steps: int = 1


def weak(nodes: int) -> Load:
    """Return as much work for each GPU on any number of nodes."""
    del nodes
    return Load(WEAK_BATCH)


def strong(nodes: int) -> Load:
    """Return an equal part of the same batch for each GPU."""
    samples = STRONG_SAMPLES // _world.rank_count(machine_of(nodes))
    return Load(min(samples, BATCH_MAX), max(1, samples // BATCH_MAX))


def calculated_s(column: str, nodes: int, load: Load) -> float:
    """Return the time of a step of a policy or, for "divided", of a setting of lohan.wrap."""
    one = fcdp_tables.work_of(MODEL, load.batch, False)
    work = dataclasses.replace(
        one,
        forward_flop=one.forward_flop * load.micro_steps,
        backward_flop=one.backward_flop * load.micro_steps,
        micro_steps=load.micro_steps,
    )
    if column == "divided":
        setting = _world_wrap.Setting("on", "parameters")
        return _world_wrap.step(work, machine_of(nodes), setting).step_s
    return world_policies.step(column, work, machine_of(nodes)).step_s


@dataclasses.dataclass(frozen=True)
class Row:
    """Steps on a number of nodes.

    Attributes:
        nodes: the number of nodes.
        load: the part of each GPU.
        step: lohan's, simulated.
        times: the seconds of a step, by column.
        cpu_s: the CPU time of the simulation.
    """

    nodes: int
    load: Load
    step: mirror.Step
    times: dict[str, float]
    cpu_s: float


def row(nodes: int, load: Load) -> Row:
    """Simulate and calculate a row of a table."""
    began = time.process_time()
    step = mirror.simulate(model_of(load.batch), machine_of(nodes), micro_steps=load.micro_steps)
    cpu_s = time.process_time() - began
    times = {column: calculated_s(column, nodes, load) for column in CALCULATED}
    return Row(nodes, load, step, {"simulated": step.step_ns / 1e9, **times}, cpu_s)


def rows(load_of: Callable[[int], Load], pool: Executor) -> list[Row]:
    """Return the rows of a table, which are simulated in parallel."""
    return list(pool.map(row, NODES, [load_of(nodes) for nodes in NODES]))


def efficiency(made: list[Row], index: int, column: str, is_weak: bool) -> float:
    """Return the time on one node over that on several, relative to the ideal one."""
    ideal = 1 if is_weak else made[index].nodes
    return made[0].times[column] / made[index].times[column] / ideal


def table(made: list[Row], is_weak: bool) -> str:
    """Format a table."""

    def cells() -> Iterator[list[str]]:
        for index, each in enumerate(made):
            load = each.load
            yield [
                f"{_world.rank_count(machine_of(each.nodes)):,}",
                f"{load.micro_steps} x {load.batch}",
                *(f"{efficiency(made, index, column, is_weak):.3f}" for column in CALCULATED),
                f"{efficiency(made, index, 'simulated', is_weak):.3f}",
                f"{each.step.step_ns / 1e9:.2f}",
                f"{each.step.update_ns / 1e9:.2f}",
                f"{each.step.net_bytes / 1e9:.1f}",
            ]

    calculated = (f"`{column}`" for column in CALCULATED)
    planned = ("efficiency", "step s", "after backward s", "sent GB")
    heads = ("GPUs", "batch of a GPU", *calculated, *(f"{PLANNED}: {each}" for each in planned))
    return world_cells.markdown("|".join(heads), cells())


TEXT = """\
GPT-10B, full fine-tuning on FCDP's cluster, with 100 Gb/s and 5 us between nodes of 8 GPUs. The
columns with names are efficiencies: the time of a step on one node over that on several, over what
it would ideally be. `divided` is what `lohan.wrap` does with
`Parallel(share=True, shard_optimizer=True)`, and the others are the papers' policies, all
calculated as above.

The columns headed "planned, not implemented" are of equal shards of states, which no setting of
`lohan.wrap` offers. They are simulated: the engines of one node run in virtual time, and all other
nodes are its images ([what a mirror assumes](simulator.md#a-mirror-for-large-clusters)). These two
kinds of figures do not mean the same step: calculated steps do not have to fit the GPU, so that
nothing is recomputed. The engine offloads and recomputes as much as 48 GiB a GPU and 490 GB a node
require.
"""
WEAK_TEXT = f"""\
Weak scaling, {WEAK_BATCH * fcdp_tables.SEQ:,} tokens for each GPU. In the plan backward hides the
gradients. On one node updates overlap with the next forward, on several they follow backward:
AdamW for half of the states takes two nodes 4.9 s. With more nodes that shrinks, and the exchange
of new values, 1.7 s, remains:
"""
STRONG_TEXT = f"""\
Strong scaling, {STRONG_SAMPLES * fcdp_tables.SEQ:,} tokens in all, in micro-batches of at most
{BATCH_MAX} sequences. From 512 GPUs on the network bounds a planned step: the 202 GB of 1,024
GPUs take 16.2 s. Each process sends its own gradients, so that sums are exact, and a node therefore
sends those of eight processes, however small their batches are. In a ring they cross a node's card
as one sum, an eighth of the bytes. Planned figures above 1 have smaller micro-batches, of which
more activations fit and fewer are recomputed:
"""


def parts(pool: Executor) -> Iterator[str]:
    """Yield the tables and their explanations, for docs/paper-results.md."""
    yield "## Scaling to 1,024 GPUs, with the engines of one node\n"
    yield TEXT
    yield WEAK_TEXT
    yield table(rows(weak, pool), True)
    yield STRONG_TEXT
    yield table(rows(strong, pool), False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    least = 1.0
    with ProcessPoolExecutor(parser.parse_args().jobs) as pool:
        for load_of in (weak, strong):
            began = time.perf_counter()
            made = rows(load_of, pool)
            print(table(made, load_of is weak))
            cpu_s = sum(each.cpu_s for each in made)
            print(f"{time.perf_counter() - began:.1f} s, {cpu_s:.1f} s of CPU time")
            if load_of is weak:
                least = min(efficiency(made, i, "simulated", True) for i in range(len(made)))
    print(f"weak scaling is at least {least:.3f} (at least {LEAST})")
    return 0 if least >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
