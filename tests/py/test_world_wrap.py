"""Plans of several GPUs: the figures of each setting of lohan.wrap(), and `lohan plan --nodes`."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import lohan
import pytest
import world_adamw
from click.testing import CliRunner
from lohan.cli import main
from lohan.planning import _machines, _models, _world, _world_wrap
from lohan.planning._world_wrap import SETTINGS, Setting, sent
from world_helper import run

WORK = _world.Work(
    param_count=1000,
    trainable_count=800,
    forward_flop=1,
    backward_flop=2,
    recompute_flop=0,
    kept_bytes=0,
    unit_count=1,
    unit_params=100,
    first_params=1,
    micro_steps=3,
)


def world(nodes: int, gpus: int, **fields: Any) -> _machines.Machine:
    return dataclasses.replace(
        _machines.load("gaming-pc"),
        node_count=nodes,
        gpu_count=gpus,
        net_bytes_per_s=10**9,
        **fields,
    )


@pytest.mark.parametrize("replicas", ["all", "parameters"])
@pytest.mark.parametrize("count", [2, 3])
def test_a_session_sends_what_is_planned(tmp_path: pathlib.Path, count: int, replicas: str) -> None:
    """Trailers of pieces, which this test makes small, are at most one percent more."""
    env = {world_adamw.REPLICAS: replicas}
    store = str(tmp_path / "run")
    found = run(tmp_path, count, world_adamw.network_stats, store, env=env, nodes=count)
    trained = sum(param.numel() for param in world_adamw.build().parameters())
    work = dataclasses.replace(
        WORK, trainable_count=trained, micro_steps=world_adamw.BATCHES // count
    )
    # The plan's parameters have 16 bits, the model's 32.
    planned = 2 * sum(sent(work, world(count, 1), Setting("off", replicas)))
    sums = [stats.traffic.sent_bytes for stats, *_ in found]
    assert planned <= sum(sums) / count <= 1.01 * planned
    if replicas == "all":
        assert len({*sums}) == 1


def test_what_a_card_sends_is_what_processes_of_other_nodes_lack() -> None:
    """Count the bytes of each pair of processes by hand, for all settings and shapes."""
    for nodes, gpus in ((1, 1), (1, 4), (2, 1), (2, 2), (4, 2), (3, 1)):
        ranks = [(node, gpu) for node in range(nodes) for gpu in range(gpus)]
        for setting in SETTINGS:
            stores = [(n, g) for n, g in ranks if g == 0 or setting.share == "off"]
            parts = len(stores) if setting.replicas == "parameters" else 1
            gradients = values = 0.0
            for node, _ in ranks:
                for to in stores:
                    if node != to[0]:
                        gradients += 3 * 2 * 800 / parts
            for one in stores:
                for to in stores:
                    if one[0] != to[0] and setting.replicas == "parameters":
                        values += 2 * 800 / parts
            found = sent(WORK, world(nodes, gpus), setting)
            assert abs(found.gradients - gradients / nodes) <= 1, (nodes, gpus, setting)
            assert abs(found.values - values / nodes) <= 1, (nodes, gpus, setting)


@pytest.mark.parametrize(
    ("nodes", "gpus", "micro_steps", "size"),
    [
        (2, 1, 1, 2),  # gradients, as in the sequential order
        (2, 2, 1, 4),  # those of two GPUs are as many bytes as their sum
        (2, 8, 1, 4),
        (4, 8, 4, 4),
        (2, 4, 3, 8),  # micro-batches 0 to 7 and 8 to 11, and 12 to 15 and 16 to 23
        (2, 3, 1, 6),  # GPU 2 alone, so that two sums are more than three gradients
        (3, 6, 1, 8),  # micro-batches 6 and 7, 8 to 11: two sums are less than six gradients
        (3, 5, 1, 10),  # eight sums of three nodes are no less than fifteen gradients
        (3, 7, 1, 12),
    ],
)
def test_in_the_order_of_a_tree_a_node_sends_few_sums(
    nodes: int, gpus: int, micro_steps: int, size: int
) -> None:
    work, machine = dataclasses.replace(WORK, micro_steps=micro_steps), world(nodes, gpus)
    for share, replicas, _ in SETTINGS:
        stores = 1 if share == "on" else gpus
        found = sent(work, machine, Setting(share, replicas, "tree"))
        receivers = (nodes - 1) * stores if replicas == "all" else (nodes - 1) / nodes
        assert found.gradients == int(size * 800 * receivers)
        assert found.values == sent(work, machine, Setting(share, replicas)).values


def test_sums_are_sent_in_the_backward_of_the_last_micro_batch() -> None:
    work = dataclasses.replace(WORK, backward_flop=30 * 10**12)
    machine = dataclasses.replace(
        world(2, 1), gpu_flop_per_s=10**12, net_bytes_per_s=8, net_latency_ns=0
    )
    setting = Setting("off", "all")
    one_by_one = _world_wrap.step(work, machine, setting)
    summed = _world_wrap.step(work, machine, setting._replace(sum_order="tree"))
    assert one_by_one.backward_s == pytest.approx(3 * 2 * 800 / 8)
    # Two of three micro-batches take 20 s; they are two nodes.
    assert summed.backward_s == pytest.approx(20 + 2 * 4 * 800 / 8)


def test_ssd_bytes_and_memory_of_a_node_follow_the_table() -> None:
    machine = world(2, 3, host_bytes=1)  # everything is on SSDs
    expected = {
        ("off", "all"): (3 * 10 * 800, 3 * 12 * 800),
        ("off", "parameters"): (10 * 400, 3 * 2 * 800 + 10 * 400),
        ("on", "all"): (10 * 800, 12 * 800),
        ("on", "parameters"): (10 * 400, 2 * 800 + 10 * 400),
    }
    for setting in SETTINGS:
        step = _world_wrap.step(WORK, machine, setting)
        stores = 1 if setting.share == "on" else 3
        read, written = expected[setting[:2]]
        spilled = step.traffic.ssd_write - written
        assert step.traffic.ssd_read - spilled == read + 2 * 3 * 2 * 1000 * stores, setting
    rich = world(2, 3, host_bytes=10**9)
    needs = {s[:2]: _world_wrap.step(WORK, rich, s).host_bytes for s in SETTINGS}
    assert needs["off", "all"] == 3 * needs["on", "all"]
    assert min(needs, key=lambda setting: needs[setting]) == ("on", "parameters")


def test_each_resource_that_is_slow_bounds_the_step_and_is_named() -> None:
    model = _models.load("gpt-13b", 8, 1024)
    work = _world.work_of(model)
    machine = dataclasses.replace(
        _machines.load("paper-4090"), node_count=2, gpu_count=2, net_bytes_per_s=10**12
    )
    setting = Setting("on", "parameters")
    base = _world_wrap.step(work, machine, setting)
    for field, name in (
        ("gpu_flop_per_s", "gpu"),
        ("net_bytes_per_s", "net"),
        ("adam_params_per_s", "cpu"),
        ("link_in_bytes_per_s", "link_in"),
    ):
        slow = dataclasses.replace(machine, **{field: getattr(machine, field) // 10**5})
        step = _world_wrap.step(work, slow, setting)
        assert step.bound_by == name and step.step_s > 2 * base.step_s


def test_only_settings_that_differ_are_offered() -> None:
    assert [setting[:2] for setting in _world_wrap.settings_of(world(1, 2))] == [
        ("off", "all"),
        ("off", "parameters"),
        ("on", "all"),
    ]
    apart = [setting[:2] for setting in _world_wrap.settings_of(world(2, 1))]
    assert apart == [("off", "all"), ("off", "parameters")]
    assert _world_wrap.settings_of(world(2, 2)) == [*SETTINGS]


def invoke(*words: str) -> Any:
    return CliRunner().invoke(main, [*words])


SMALL = ("--model", "opt-1.3b", "--machine", "gaming-pc", "--batch", "4")


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_the_fastest_setting_is_printed_as_a_call_that_wrap_takes(command: str) -> None:
    answer = invoke(command, *SMALL, "--nodes", "2", "--gpus", "2", "--net", "10Gb/s", "--json")
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.output)
    assert found["machine"]["net_bytes_per_s"] == 1_250_000_000
    ours = [row for row in found["rows"] if row["name"] == "lohan"]
    assert len(ours) == 4
    best = min(ours, key=lambda row: row["step_s"])
    assert found["best"] == {"share": best["share"], "replicas": best["replicas"]}
    lohan.Config(**found["best"])  # which checks its arguments
    text = invoke(command, *SMALL, "--nodes", "2", "--gpus", "2", "--net", "10Gb/s").output
    share, shards = best["share"] == "on", best["replicas"] == "parameters"
    call = (
        f"wrap(model, store=..., parallel=lohan.Parallel(share={share}, shard_optimizer={shards}))"
    )
    assert call in " ".join(text.split()) and "--nnodes=2" in text and "--nproc-per-node=2" in text
    assert max(map(len, text.splitlines()[2:8])) <= 80


def test_adapters_send_only_their_own_gradients() -> None:
    words = (*SMALL, "--nodes", "2", "--net", "1Gb/s", "--json")
    full = json.loads(invoke("plan", *words).output)
    lora = json.loads(
        invoke("plan", *words, "--adapter-params", "1000000", "--accumulate", "2").output
    )
    by_replicas = {row["replicas"]: row for row in lora["rows"] if row["name"] == "lohan"}
    assert by_replicas["all"]["net_bytes"] == 2 * 2 * 1_000_000
    assert by_replicas["parameters"]["net_bytes"] == (2 * 2 + 2) * 500_000
    assert full["rows"][0]["net_bytes"] > 100 * by_replicas["all"]["net_bytes"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", "2"), "net_bytes_per_s is 0: pass --net"),
        (("--nodes", "2", "--net", "fast"), "--net 'fast' is not a size"),
        (("--nodes", "2", "--net", "1Gb/s", "--policy", "zero"), "--policy cannot be combined"),
        (("--gpus", "2", "--sweep", "batch=1,2"), "--sweep cannot be combined"),
        (("--gpus", "2", "--order", "vertical"), "--order cannot be combined"),
        (("--gpus", "2", "--ram", "1GB"), "does not fit"),
        (("--gpus", "2", "--ram", "6GB"), "of 6,000,000,000 bytes (6 GB) of main memory, the sums"),
        (("--gpus", "2", "--ram", "5GB"), "main memory is too small: with Parallel(share=True"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_refused_by_name(words: tuple[str, ...], said: str) -> None:
    answer = invoke("plan", *SMALL, *words)
    assert answer.exit_code in (1, 2) and said in " ".join(answer.output.split()), answer.output
    assert "Traceback" not in answer.output
