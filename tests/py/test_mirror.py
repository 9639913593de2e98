"""`python -m lab mirror`: a cluster whose nodes are the images of one, and what has no image."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click.testing
import pytest
from lab import mirror
from lab.__main__ import main
from lohan.errors import BudgetError, MachineError
from lohan.planning import _machines, _plan

NET = 12_500_000_000


def machine(nodes: int, gpus: int = 2, **changes: Any) -> _machines.Machine:
    here = dataclasses.replace(
        _machines.load("paper-fcdp"),
        node_count=nodes,
        gpu_count=gpus,
        net_bytes_per_s=NET,
        net_latency_ns=5_000,
    )
    return dataclasses.replace(here, **changes)


def model(layers: int = 2, hidden: int = 512, batch: int = 8) -> _plan.Model:
    return _plan.decoder("m", layers=layers, hidden=hidden, vocab=1000, seq=1024, batch=batch)


@pytest.mark.parametrize("division", mirror.DIVISIONS)
@pytest.mark.parametrize("nodes", [1, 2, 5, 8])
def test_a_mirror_has_the_step_of_the_whole_cluster(division: str, nodes: int) -> None:
    words: dict[str, Any] = {"division": division, "micro_steps": 2}
    image = mirror.simulate(model(), machine(nodes), **words)
    assert image == mirror.simulate(model(), machine(nodes), **words, is_mirror=False)
    assert image.step_ns > 0


def test_a_node_sends_what_the_division_says() -> None:
    trained, nodes, gpus, micro_steps = model().param_count, 4, 2, 3
    gradients = 2 * trained * micro_steps * gpus * (nodes - 1)
    words: dict[str, Any] = {"micro_steps": micro_steps}
    whole = mirror.simulate(model(), machine(nodes), division="whole", **words)
    assert whole.net_bytes == pytest.approx(gradients, rel=0.01)
    shards = mirror.simulate(model(), machine(nodes), division="shards", **words)
    values = 2 * trained * (nodes - 1) // nodes
    assert shards.net_bytes == pytest.approx(gradients // nodes + values, rel=0.02)
    assert shards.tokens == model().tokens * micro_steps * nodes * gpus


def test_weak_scaling_to_1024_gpus() -> None:
    large = model(layers=4, hidden=4800, batch=64)
    one, all_nodes = (mirror.simulate(large, machine(nodes, 8)) for nodes in (1, 128))
    assert one.step_ns / all_nodes.step_ns >= 0.9
    slow = mirror.simulate(large, machine(128, 8, net_bytes_per_s=NET // 20))
    assert one.step_ns / slow.step_ns < 0.9


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({}, {"division": "blocks"}, "has no mirror: with whole blocks"),
        ({}, {"division": "half"}, "must be one of shards, whole"),
        ({"net_bytes_per_s": 0}, {}, "net_bytes_per_s is 0"),
        ({"link_total_bytes_per_s": 10**9}, {}, "no limit for all 2 links together"),
    ],
)
def test_what_has_no_mirror_is_named(
    changes: dict[str, Any], words: dict[str, Any], message: str
) -> None:
    with pytest.raises(MachineError, match=message):
        mirror.simulate(model(), machine(2, **changes), **words)


def test_activations_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BudgetError):
        mirror.simulate(model(), machine(2, host_bytes=10**9))


def command(*arguments: str) -> click.testing.Result:
    words = ["mirror", "--model", "gpt-13b", "--machine", "paper-fcdp", "--batch", "1"]
    return click.testing.CliRunner().invoke(main, [*words, *arguments])


def test_the_command_prints_the_step() -> None:
    words = ("--nodes", "64", "--gpus", "2", "--net", "100Gb/s", "--accumulate", "2")
    done = command(*words)
    assert done.exit_code == 0, done.output
    assert "gpt-13b on 64 nodes with 2 GPUs each" in done.output
    answer = json.loads(command(*words, "--json").output)
    assert answer["step_ns"] > 0
    assert answer["micro_steps"] == 2
    assert f"{answer['step_s']:.3f} s: forward" in done.output


def test_the_command_refuses_an_unknown_division() -> None:
    done = command("--division", "thirds")
    assert done.exit_code == 2
    assert "'thirds' must be one of shards, whole" in done.output
