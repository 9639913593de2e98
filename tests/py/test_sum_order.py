"""Sums of gradients in the order of a tree: their bits, what they need, and what is sent."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import lohan
import pytest
import torch
import world_adamw
import world_sums
from lohan.common._inside import inside
from lohan.errors import UnsupportedError
from lohan.layout._partial_sums import Tree, nodes_of, places_alone, places_of
from quick_helper import half_quick
from rules_helper import Workshop
from torch import nn
from world_helper import run
from world_sums import TREE

PROBE = {"lr": 1.0, "betas": (0.0, 0.0), "eps": 1e30, "weight_decay": 0.0}
SIZES = (5000, 3000)


class Probe(nn.Module):
    """Its gradients are its inputs: sums can be read off the step of an AdamW without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(size)) for size in SIZES)

    def forward(self, *inputs: torch.Tensor | None) -> torch.Tensor:
        pairs = zip((self.first, self.second), inputs, strict=True)
        return sum(((w * x).sum() for w, x in pairs if x is not None), torch.zeros(()))


def tree_of(terms: dict[int, torch.Tensor], at: int = 0, size: int = 64) -> torch.Tensor | None:
    """Return the value of a node, by its definition: a range of numbers of micro-batches."""
    if size == 1:
        return terms.get(at)
    left, right = (tree_of(terms, at + half, size // 2) for half in (0, size // 2))
    return right if left is None else left if right is None else left + right


def inputs_of(count: int) -> list[list[torch.Tensor | None]]:
    """Return the inputs of micro-batches, of which some have none for the second parameter."""
    torch.manual_seed(count)
    rows = []
    for number in range(count):
        first, second = (torch.randn(size) * 10.0 ** (number % 3 - 1) for size in SIZES)
        rows.append([first, second if (number * 7 + count) % 3 else None])
    return rows


def values_of(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters after the step in which they were -sum / eps."""
    model.optimizer.step()
    values = [value.cpu().clone() for value in model.state_dict().values()]
    model.lohan.close()
    return values


@pytest.mark.parametrize(
    ("order", "device", "count", "left"),
    half_quick(["horizontal", "vertical"], ["cpu", "emu"], [2, 4, 5, 7, 8], [0, 1]),
)
def test_one_process_adds_as_the_tree_says_in_any_order_and_on_any_device(
    order: str, device: str, count: int, left: int, workshop: Workshop
) -> None:
    """`left` of the micro-batches that a step may have are not made."""
    rows = inputs_of(count - left)
    settings = {"accumulate": count, "order": order, "device": device, "parallel": TREE}
    model = workshop.wrap(Probe(), **settings, **PROBE)
    if order == "vertical":
        model.lohan.accumulate([functools.partial(model, *row) for row in rows])
    else:
        for row in rows:
            model(*row).backward()
    found = values_of(model)
    sums = [
        tree_of({at: x for at, x in enumerate(column) if x is not None})
        for column in zip(*rows, strict=True)
    ]
    one = workshop.wrap(Probe(), **PROBE)
    one(*sums).backward()
    for value, expected in zip(found, values_of(one), strict=True):
        assert torch.equal(value, expected)


def test_partial_sums_have_places_in_the_budget_and_up_to_three_micro_batches_need_no_more(
    workshop: Workshop,
) -> None:
    least = {}
    for count in (2, 3, 4, 7, 8):
        for order in ("sequential", "tree"):
            parallel = lohan.Parallel(sum_order=order)
            settings = {"accumulate": count, "parallel": parallel, **PROBE}
            least[count, order] = workshop.least(Probe(), **settings)
    more = {count: least[count, "tree"] - least[count, "sequential"] for count, _ in least}
    elements = inside(workshop.wrap(Probe(), **PROBE)).layout.units[0].elements
    assert more == {2: 0, 3: 0, 4: 4 * elements, 7: 4 * elements, 8: 8 * elements}


def test_a_range_of_micro_batches_consists_of_few_nodes() -> None:
    for count in range(1, 40):
        assert places_alone(count) == max(1, count.bit_length() - 1)
        for first in range(70):
            nodes = nodes_of(first, count)
            ends = [*nodes[1:], first + count]
            for begin, end in zip(nodes, ends, strict=True):
                size = end - begin
                assert size & (size - 1) == 0 and begin % size == 0
            assert len(nodes) <= 2 * count.bit_length()
            most = max(len(nodes_of(first, part)) for part in range(1, count + 1))
            assert places_of(first, count) == most
    # Of two machines, the second one has micro-batches 6, 7, and 8 to 11.
    two = Tree(4, 3, [0, 0, 1, 1], 2.0)
    assert [two.nodes_of_machine(ranks) for ranks in two.machines[::2]] == [[0, 4], [6, 8]]
    assert (two.copies, Tree(4, 3).copies) == (2, 2)
    for machines in ([0, 0, 0, 0], [0, 1, 0, 1], []):  # one machine; ranks that are not in a row
        assert not Tree(4, 3, machines, 2.0).has_machines
    sizes = {size: Tree(4, 1, [0, 0, 1, 1], size).copies for size in (2.0, 4.0)}
    assert sizes == {2.0: 0, 4.0: 1}  # two gradients in 16 bits are no more than their sum
    many = Tree(80, 1, [rank // 40 for rank in range(80)], 2.0).machines
    assert {len(ranks) for ranks in many} == {32, 8}
    assert (Tree(2, 1).copies, Tree(2, 4).copies, Tree(4, 3).copies) == (0, 1, 2)


@pytest.mark.parametrize(("count", "micro_batches"), [(2, 1), (2, 4), (2, 3), (3, 4), (3, 5)])
def test_a_process_sends_its_partial_sums_once_a_step(
    tmp_path: pathlib.Path, count: int, micro_batches: int
) -> None:
    nodes = [len(nodes_of(rank * micro_batches, micro_batches)) for rank in range(count)]
    size = 2 if micro_batches == 1 else 4
    found = run(tmp_path, count, world_sums.sent, str(tmp_path / "run"), micro_batches, "tree")
    for rank, (sent, planned, params) in enumerate(found):
        assert sent == planned
        values = size * nodes[rank] * params * (count - 1)
        assert values <= sent < 1.02 * values


# Processes and machines, and for each run micro-batches of each process, dtype, and the nodes of a
# machine; 0: each process sends its own gradients, which are no more bytes.
MACHINES = [
    (4, 2, [(1, "float32", 1)]),
    (4, 2, [(1, "bfloat16", 0), (3, "bfloat16", 2), (4, "bfloat16", 1)]),
    (6, 2, [(2, "float32", 2)]),
    (8, 2, [(1, "bfloat16", 1)]),
]


def _check_sent(
    found: list[dict[str, Any]], machines: int, size: int, nodes: int, settings: dict[str, str]
) -> None:
    """Check the bytes that processes have sent, of which machines have as many each.

    Args:
        found: what each process has sent.
        machines: the number of machines.
        size: that of an element.
        nodes: the sums that a machine sends; 0: each process sends its gradients.
        settings: what the processes share and divide.
    """
    each, params = len(found) // machines, found[0]["count"]
    out = [0, 0, 0]  # of all machines: bytes of messages, of gradients, and of new parameters
    for rank, one in enumerate(found):
        assert one["states"] == found[0]["states"]
        assert one["to"] == {to: planned[0] for to, planned in one["planned to"].items()}
        assert one["sent"] == one["planned"] == sum(one["to"].values())
        for to, planned in one["planned to"].items():
            if to // each != rank // each:
                out = [total + nbytes for total, nbytes in zip(out, planned, strict=True)]
    stores = 1 if "share" in settings else each  # of a machine
    divided = "replicas" in settings
    gradient = 4 * nodes if nodes else size * each
    receivers = 1 if divided else stores * machines
    assert out[1] == gradient * params * (machines - 1) * receivers
    assert out[2] == (size * params * (machines - 1) * stores if divided else 0)
    assert out[0] < 1.02 * (out[1] + out[2])


@pytest.mark.parametrize(
    ("count", "machines", "cases"), MACHINES, ids=("two", "some", "three", "four")
)
def test_a_machine_sends_the_sums_of_its_processes_once(
    tmp_path: pathlib.Path, count: int, machines: int, cases: list[tuple[int, str, int]]
) -> None:
    """Whatever is shared and divided, the states are those of one process, bit for bit."""
    rows = [(str(tmp_path / f"{at}"), *row[:2]) for at, row in enumerate(cases)]
    told = run(tmp_path, count, world_sums.sent_all, rows, nodes=machines)
    whole = [(f"{name}-one", k * count, dtype) for name, k, dtype in rows]
    expected = run(tmp_path, 1, world_sums.states_of_one, whole, count)[0]
    for at, (_, dtype, nodes) in enumerate(cases):
        size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
        for way, settings in world_sums.MACHINE_WAYS.items():
            found = [each[at, way] for each in told]
            assert found[0]["states"] == expected[at], (at, way)
            _check_sent(found, machines, size, nodes, settings)


def test_a_second_gradient_in_a_backward_is_not_sent_in_place_of_the_first_one(
    tmp_path: pathlib.Path,
) -> None:
    for said in run(tmp_path, 2, world_sums.repeated, str(tmp_path / "run")):
        assert said.startswith("True GradientError: parameter 'inner.")
        assert "has several gradients in one backward" in said and "use_reentrant=False" in said


def test_any_number_of_processes_has_one_hash(tmp_path: pathlib.Path) -> None:
    """Twelve micro-batches: those of 1, 2 or 4 processes are no single node of the tree."""
    found = {}
    for count in (1, 2, 3, 4):
        rows = [
            (str(tmp_path / f"{dtype}-{change}-{count}"), 3, dtype, {"change": change})
            for dtype, change in (("float32", "order"), ("bfloat16", "absent"))
        ]
        told = run(tmp_path, count, world_adamw.train_all, rows, env=world_adamw.TREE)
        assert told == told[:1] * count
        found[count] = told[0]
    assert found == dict.fromkeys(found, found[1])


@pytest.mark.parametrize("clips", [False, True])
def test_a_step_may_have_fewer_micro_batches_than_it_may_have_at_most(
    tmp_path: pathlib.Path, clips: bool
) -> None:
    """With two of two or of eight, the nodes are the same, and so are the bits."""
    found = [
        run(tmp_path, 2, world_sums.in_fewer, str(tmp_path / f"{most}-{clips}"), most, clips)
        for most in (2, 8)
    ]
    whole = run(tmp_path, 1, world_sums.in_fewer, str(tmp_path / "one"), 4, clips)
    norms, states = whole[0]
    means = [norm / 2 for norm in norms]  # over the processes
    assert found == [[(means, states)] * 2] * 2


def test_a_store_keeps_the_order_of_its_sums(tmp_path: pathlib.Path) -> None:
    def train(name: str, *orders: Any) -> list[str]:
        return world_sums.resumed(str(tmp_path / name), orders)

    tree, sequential = (train(name, name, None, None) for name in ("tree", "sequential"))
    assert train("plain", None, "sequential", None) == sequential
    assert all(one != other for one, other in zip(tree, sequential, strict=True))
    said = train("other", "tree", "sequential")[1]
    assert said.startswith("StoreMismatchError: Parallel(sum_order='sequential'): this store")
    assert "leave sum_order out" in said
    said = train("plainer", None, "tree")[1]
    assert "in the order 'sequential'" in said


def test_a_tree_needs_the_number_of_micro_batches(workshop: Workshop) -> None:
    with pytest.raises(UnsupportedError, match="pass the largest number of backwards in a step"):
        workshop.wrap(Probe(), accumulate="manual", parallel=TREE)
