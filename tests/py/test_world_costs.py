"""Steps of several GPUs and nodes: bytes over each link, memory and times against results by hand.

The machine has rates of 1 GB/s and 1 TFLOP/s, so that times can be read off the bytes.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from lab import world_base, world_elixir, world_lohan, world_policies
from lohan.errors import BudgetError, MachineError
from lohan.planning import _machines, _plan, _world, _world_lohan
from lohan.planning._world import Work
from lohan.simulate import simulate

G = 10**9
# 8 G parameters: 16 GB in 16 bits.
WORK = Work(
    param_count=8 * G,
    trainable_count=8 * G,
    forward_flop=10**12,
    backward_flop=2 * 10**12,
    recompute_flop=0,
    kept_bytes=5 * G,
    unit_count=10,
    unit_params=G,
    first_params=G,
)
LORA = dataclasses.replace(WORK, trainable_count=8_000_000, backward_flop=10**12)
ALL = world_policies.NAMES
RINGS = ("ddp", "zero2", "zero3", "mics", "hsdp", "zeropp", "fcdp-sched", "fcdp-comm", "fcdp")


def machine(**changes: int) -> _machines.Machine:
    """Return two nodes of four GPUs whose rates are 1 GB/s, except for those given."""
    rates = {
        "gpu_flop_per_s": 10**12,
        "gpu_bytes": 80 * G,
        "link_in_bytes_per_s": G,
        "link_out_bytes_per_s": G,
        "peer_bytes_per_s": G,
        "net_bytes_per_s": G,
        "host_bytes": 1000 * G,
        "adam_params_per_s": G,
        "ssd_count": 1,
        "ssd_read_bytes_per_s": G,
        "ssd_write_bytes_per_s": G,
        "node_count": 2,
        "gpu_count": 4,
    }
    return _machines.Machine(name="by hand", **(rates | changes))


def step(policy: str, work: Work = WORK, **changes: int) -> _world.Step:
    return world_policies.step(policy, work, machine(**changes))


# A ring of 8 ranks sends 7/8 of 16 GB over each card: 14 GB. The sums of MiCS and HSDP cross it in
# four all-reduces of 4 GB between two nodes. lohan's nodes exchange half: 8 GB of parameters.
@pytest.mark.parametrize(
    ("policy", "forward", "backward", "update"),
    [
        ("ddp", 0, 28, 0),
        ("zero2", 0, 14, 14),
        ("zero3", 14, 28, 0),
        ("mics", 0, 16, 0),
        ("hsdp", 0, 16, 0),
        ("zeropp", 14, 14, 0),
        ("fcdp-sched", 14, 14, 0),
        ("fcdp-comm", 14, 14, 0),
        ("fcdp", 14, 14, 0),
        ("zero3-offload", 14, 28, 0),
    ],
)
def test_each_card_sends_what_the_papers_derive(
    policy: str, forward: int, backward: int, update: int
) -> None:
    moved = step(policy).traffic
    assert moved.net_forward == forward * G
    assert moved.net_backward == backward * G
    assert moved.net_update == update * G
    assert moved.net_bytes == (forward + backward + update) * G


@pytest.mark.parametrize(
    ("sums", "backward"), [("exact", 32 * 2), ("rank", 64), ("node", 16), ("node16", 8)]
)
def test_lohans_nodes_exchange_half_and_gradients_by_the_order_of_sums(
    sums: str, backward: int
) -> None:
    work = dataclasses.replace(WORK, micro_steps=2)
    moved = world_policies.step("lohan", work, machine(), sums=sums).traffic
    assert moved.net_forward == 8 * G
    # exact: 2 G k bytes a parameter, k = 2; a half of that stays on the node
    assert moved.net_backward == backward * G


@pytest.mark.parametrize(
    ("nodes", "gpus", "micro_steps", "sums"),
    [
        (1, 8, 9, "exact"),
        (2, 1, 2, "exact"),
        (2, 2, 1, "exact"),
        (2, 2, 2, "node"),
        (4, 8, 1, "node"),
    ],
)
def test_sums_are_exact_where_that_costs_no_more_than_fp32_sums_of_a_node(
    nodes: int, gpus: int, micro_steps: int, sums: str
) -> None:
    here = machine(node_count=nodes, gpu_count=gpus)
    work = dataclasses.replace(WORK, micro_steps=micro_steps)
    assert world_lohan.sums_of(world_lohan.Options(), work, here) == sums
    exact, node = (world_lohan.gradient_bytes(one, work, here) for one in ("exact", "node"))
    assert nodes == 1 or (exact <= node) is (sums == "exact")


def test_frozen_parameters_cross_the_network_only_where_the_policy_does_not_know_them() -> None:
    frozen = {name: step(name, LORA).traffic.net_bytes for name in RINGS}
    adapters = 7 * 2 * LORA.trainable_count // 8
    assert frozen["zero3"] == 2 * 14 * G + adapters
    assert frozen["zeropp"] == frozen["fcdp-sched"] == 14 * G + adapters
    assert frozen["fcdp-comm"] == frozen["fcdp"] == 2 * adapters
    moved = world_policies.step("lohan", LORA, machine(), sums="node16").traffic
    assert moved.net_bytes == 2 * LORA.trainable_count  # half of 2 bytes, twice


def test_gpu_memory_is_what_the_papers_derive() -> None:
    # 16 GB of P16, 112 GB of gradients and states; two gathered units of 2 GB; 5 GB of activations
    extra = 4 + 5
    expected = {
        "ddp": 128 + 5,
        "zero2": 16 + 14 + 5,
        "zero3": 16 + extra,
        "mics": 32 + extra,
        "zeropp": 16 + 4 + extra,
        "fcdp-sched": 16 + extra,
    }
    assert {name: step(name).gpu_bytes // G for name in expected} == expected
    assert step("fcdp-sched").host_bytes == 16 * G
    assert step("zero3").host_bytes == 0


def test_fcdps_cache_keeps_parameters_on_the_gpu_up_to_tau_and_moves_only_the_rest() -> None:
    here = machine(gpu_bytes=40 * G)  # 25 GB are taken: tau 0.75 leaves 5 of the 16 GB
    some = world_policies.step("fcdp", WORK, here, tau=0.75)
    none = world_policies.step("fcdp", WORK, here, tau=0.0)
    assert some.gpu_bytes == 30 * G and none.gpu_bytes == 25 * G
    assert none.traffic.in_backward == none.traffic.out_forward == 4 * G
    assert some.traffic.in_backward == some.traffic.out_forward == 11 * G // 4
    assert some.traffic.net_bytes == none.traffic.net_bytes
    assert step("fcdp").traffic.in_backward == 0  # all of them fit


def test_a_stage_is_as_long_as_its_busiest_resource_and_the_last_bucket_is_not_hidden() -> None:
    slow = step("zero3")
    assert slow.forward_s == 14  # the network; the GPU takes a second
    assert slow.backward_s == 28
    assert slow.bound_by == "net"
    fast = step("zero3", net_bytes_per_s=1000 * G, peer_bytes_per_s=1000 * G)
    bucket_s = 7 / 8 * 2 * world_base.BUCKET_PARAMS / (1000 * G)
    assert fast.forward_s == 1
    assert fast.backward_s == pytest.approx(2 + bucket_s)


def test_adapters_that_fit_a_bucket_are_exchanged_without_being_hidden() -> None:
    ring_s = 7 / 8 * 2 * LORA.trainable_count / G
    done = step("fcdp-comm", LORA, peer_bytes_per_s=1000 * G, link_in_bytes_per_s=1000 * G)
    assert done.forward_s == pytest.approx(1 + ring_s)
    assert done.backward_s == pytest.approx(1 + ring_s)


def test_each_message_of_a_ring_waits_for_the_one_before_it() -> None:
    late = step("zero3", net_latency_ns=1_000_000)
    assert late.forward_s == pytest.approx(14 + 10 * 7 * 1e-3)
    assert late.backward_s == pytest.approx(28 + 2 * 10 * 7 * 1e-3)


def test_one_node_sends_nothing() -> None:
    for policy in ALL:
        if policy != "elixir":
            assert step(policy, node_count=1, net_bytes_per_s=0).traffic.net_bytes == 0


def test_lohans_equations_are_lohans_for_one_gpu() -> None:
    swapped = dataclasses.replace(WORK, swapped_bytes=3 * G)
    paper = dataclasses.replace(world_lohan.PAPER, is_shared=True)
    here = machine(node_count=1, gpu_count=1, ssd_read_bytes_per_s=2 * G)
    done = world_lohan.step(swapped, here, paper)
    # T_f: the link takes 16 s, the GPU 1 s, the SSDs read 16 GB at 2 GB/s. T_b: 14 bytes a
    # parameter are read at 2 GB/s and written at 1 GB/s. Then the first unit's update, an eighth.
    assert done.forward_s == 16
    assert done.backward_s == 14 * 8 / 2 + 14 * 8
    assert done.update_s == (12 / 2 + 14) * 8 / 8
    assert done.traffic.ssd_read == (14 + 2) * 8 * G
    assert done.traffic.ssd_write == 14 * 8 * G
    assert done.traffic.in_backward == 19 * G


def test_a_node_reads_parameters_once_and_updates_its_part_whatever_its_gpus() -> None:
    options = world_lohan.Options("node16", is_on_ssd=True)
    ssd = {
        (nodes, gpus): world_lohan.step(
            WORK, machine(node_count=nodes, gpu_count=gpus), options
        ).traffic
        for nodes, gpus in itertools.product((1, 2, 4), (1, 4))
    }
    for (nodes, gpus), moved in ssd.items():
        assert moved == dataclasses.replace(ssd[nodes, 1], ssd_read=ssd[1, gpus].ssd_read // nodes)
        assert moved.ssd_write == 12 * 8 * G // nodes
    private = dataclasses.replace(options, is_shared=False)
    more = world_lohan.step(WORK, machine(node_count=1), private).traffic
    assert more.ssd_read - ssd[1, 4].ssd_read == 3 * 2 * 16 * G  # three more readers, two passes


def test_deferring_updates_is_never_slower_and_helps_where_backward_waits_for_them() -> None:
    eager = world_lohan.Options("node16", is_deferred=False)
    for adam, gains in ((10**8, True), (10**12, False)):
        here = machine(adam_params_per_s=adam, net_bytes_per_s=100 * G)
        before = world_lohan.step(WORK, here, eager)
        after = world_lohan.step(WORK, here, dataclasses.replace(eager, is_deferred=True))
        assert (after.step_s < before.step_s) is gains
        assert after.step_s <= before.step_s
        assert after.traffic == before.traffic


def test_deferred_updates_are_not_lost_but_moved() -> None:
    # The SSDs bound both stages: what one of them gains the other loses.
    here = machine(gpu_count=1, net_bytes_per_s=100 * G, adam_params_per_s=100 * G)
    here = dataclasses.replace(here, link_in_bytes_per_s=100 * G, link_out_bytes_per_s=100 * G)
    options = world_lohan.Options("node16", is_on_ssd=True)
    done = world_lohan.step(WORK, here, options)
    moved = done.traffic
    assert done.forward_s + done.backward_s == (moved.ssd_read + moved.ssd_write) / G
    slow = dataclasses.replace(here, ssd_read_bytes_per_s=10**13, ssd_write_bytes_per_s=10**13)
    slow = dataclasses.replace(slow, adam_params_per_s=10**8)
    late = world_lohan.step(WORK, slow, options)
    assert late.forward_s + late.backward_s == pytest.approx(4 * 10)  # 4 G parameters a node


def test_auto_replicates_states_only_where_that_is_faster() -> None:
    # Sharded: 8 GB each way in forward and in backward. Replicated: only in backward, but each
    # node updates all parameters.
    quick = {"adam_params_per_s": 1000 * G, "gpu_flop_per_s": 10**15, "link_in_bytes_per_s": 99 * G}
    sharded, chosen = step("lohan", **quick), step("auto", **quick)
    assert chosen.step_s < sharded.step_s
    assert chosen.traffic.net_forward == 0
    # Where only sharded states fit main memory, replicated ones would be on SSDs.
    assert chosen.host_bytes > sharded.host_bytes
    small = {**quick, "host_bytes": chosen.host_bytes - 1}
    assert step("auto", **small).traffic == step("lohan", **small).traffic
    assert step("auto", **small).traffic.ssd_read == 0


def test_activations_that_main_memory_cannot_hold_pass_the_ssds() -> None:
    work = dataclasses.replace(WORK, swapped_bytes=10 * G)
    options = world_lohan.Options("node16", is_on_ssd=True)
    roomy = world_lohan.step(work, machine(), options)
    tight = world_lohan.step(work, machine(host_bytes=roomy.host_bytes - 7 * G), options)
    assert tight.traffic.ssd_write - roomy.traffic.ssd_write == 7 * G
    assert tight.traffic.ssd_read - roomy.traffic.ssd_read == 7 * G
    assert roomy.host_bytes - tight.host_bytes == 7 * G


def test_swaps_are_lohans_order_from_inter_block_activations_to_all() -> None:
    model = _plan.named_model("gpt-13b", batch=8)
    works = list(_world_lohan.swaps(model, _world.work_of(model)))
    assert works[0].swapped_bytes == model.inter_block_bytes
    assert works[-1].swapped_bytes == model.activation_bytes
    assert works[0].recompute_flop == sum(
        layer.forward_flop
        for layer in model.layers
        if layer.activation_bytes and not layer.is_inter_block
    )
    assert works[-1].recompute_flop == 0
    pairs = list(itertools.pairwise(works))
    gains = [
        (a.recompute_flop - b.recompute_flop) / (b.swapped_bytes - a.swapped_bytes)
        for a, b in pairs
    ]
    assert gains == sorted(gains, reverse=True)


def test_elixir_moves_less_with_more_room_and_reads_states_from_no_link_if_they_fit() -> None:
    work = dataclasses.replace(WORK, kept_bytes=G)
    loads = []
    for gpu_bytes in (16 * G, 24 * G, 80 * G):
        where = world_elixir.layout(work, machine(gpu_bytes=gpu_bytes, node_count=1, gpu_count=1))
        assert 8 * G <= where.loads <= 16 * G
        assert where.cpu_loads <= where.loads
        loads.append(where.cpu_loads)
    assert loads == sorted(loads, reverse=True) and loads[0] > loads[-1]
    whole = step("elixir", work, gpu_bytes=1000 * G, node_count=1)
    assert whole.traffic.in_forward == whole.traffic.in_backward == whole.traffic.out_backward == 0
    assert whole.host_bytes == 0 and whole.update_s == 0


def test_elixirs_stages_are_as_long_as_their_busiest_part_or_the_sum() -> None:
    here = machine()
    apart = world_elixir.zero3_offload(WORK, here, overlaps=False)
    assert apart.forward_s == 1 + 14 + 14 + 2  # GPU, card, ring, a shard over the link
    assert apart.backward_s == 2 + 28 + 28 + 2 + 2
    assert apart.update_s == 4
    assert apart.host_bytes == 18 * 8 * G // 2
    assert step("elixir", gpu_bytes=12 * G).host_bytes == 14 * 8 * G // 2
    assert world_elixir.zero3_offload(WORK, here).forward_s == 14
    assert step("elixir", WORK, gpu_bytes=12 * G).forward_s == 14


def test_what_cannot_be_planned_is_refused_by_name() -> None:
    with pytest.raises(MachineError, match="net_bytes_per_s is 0"):
        step("zero3", net_bytes_per_s=0)
    with pytest.raises(MachineError, match="policy 'zero4': must be one of ddp, "):
        step("zero4")
    with pytest.raises(MachineError, match="sums 'fast': must be auto or one of exact, "):
        world_policies.step("lohan", WORK, machine(), sums="fast")
    with pytest.raises(BudgetError, match=r"elixir: room for .* is too small"):
        step("elixir", gpu_bytes=8 * G)


def test_the_engine_is_simulated_on_one_gpu_alone() -> None:
    model = _plan.named_model("gpt-6b", batch=1)
    with pytest.raises(MachineError, match=r"has 8 GPUs.*set node_count=1 and gpu_count=1"):
        simulate(model, machine())


def test_the_fastest_policies_fit_and_come_first() -> None:
    here = machine(gpu_bytes=40 * G)
    found = world_policies.fastest(WORK, here)
    assert [one.step_s for one in found] == sorted(one.step_s for one in found)
    assert all(one.fits(here) for one in found)
    assert {"ddp", "mics"}.isdisjoint(one.policy for one in found)
    assert {"zero3", "lohan"} <= {one.policy for one in found}


def test_work_counts_backward_and_recomputation_of_a_model() -> None:
    model = _plan.named_model("gpt-6b", batch=2)
    full = _world.work_of(model, micro_steps=3)
    assert full.forward_flop == 3 * model.forward_flop
    assert full.backward_flop == 2 * full.forward_flop
    assert full.param_count == full.trainable_count == model.param_count
    lora = _world.work_of(model, adapter_params=1000, recomputes=True)
    assert lora.backward_flop == lora.forward_flop == model.forward_flop
    assert lora.param_count - model.param_count == lora.trainable_count == 1000
    head = model.layers[-1].forward_flop
    assert lora.recompute_flop == model.forward_flop - head
    assert lora.kept_bytes < full.kept_bytes
