"""lohan simulate: machines from TOML, models by name, steps in virtual time, refusals."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import pathlib
import signal
import threading
import time
import types

import pytest
from click.testing import CliRunner, Result
from lohan import _core
from lohan.cli import main
from lohan.errors import BudgetError, LohanError, MachineError
from lohan.planning import _machines, _placement, _plan, _policies
from lohan.simulate import Options, simulate
from patience import slowness

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "sim_steps.csv"
# A model whose simulation takes only a moment.
SMALL = {"name": "opt-1.3b", "batch": 8, "seq": 1024}


SAVED = ("memory_bytes", "transit_bytes", "ssd_bytes", "out_bytes", "ahead_bytes")


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *words])


def answer(*words: str) -> dict:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def machine(*changes: str) -> _machines.Machine:
    return _machines.change(_machines.load("paper-4090"), changes)


# --- steps --------------------------------------------------------------------------------------


def test_the_binding_runs_the_simulation_that_the_golden_file_has() -> None:
    with GOLDEN.open() as file:
        rows = list(csv.DictReader(file))
    golden = next(r for r in rows if (r["preset"], r["schedule"]) == ("balanced", "optimized"))
    count = 16 << 20
    found = core_call(
        units=[("bfloat16", False, count)] * 40,
        blocks=[((i,), ((count // 2, count, ()),)) for i in range(40)],
        saved=dict.fromkeys(SAVED, 0),
        ssd_read_bytes_per_s=24 * 10**9,
        ssd_write_bytes_per_s=24 * 10**9,
        ssd_latency_ns=80_000,
        ssd_queue_depth=64,
        ssd_sync_ns=200_000,
        worker_count=4,
        worker_bytes_per_s=12 * 10**9,
        host_bytes=int(golden["host_bytes"]),
        io_depth=16,
        transfer_bytes=4 << 20,
    )
    times = ("step_ns", "forward_ns", "forward_wait_ns", "backward_wait_ns", "gradient_wait_ns")
    for name in (*times, "update_busy_ns"):
        assert found[name] == int(golden[name]), name
    for name in ("shared", "gathered"):  # the file is of one process
        assert found["bytes"].pop(name) == 0
    assert found["bytes"] == {name: int(golden[name]) for name in found["bytes"]}


def test_no_resource_is_busy_for_longer_than_the_step_and_the_busiest_bounds_it() -> None:
    step = simulate(_plan.named_model(**SMALL), machine("ssd_count=1", "host_bytes=8 GB"))
    shares = {name: resource.busy_share for name, resource in step.resources.items()}
    assert all(0 < share <= 1 for share in shares.values()), shares
    assert shares[step.bound_by] == max(shares.values()) == pytest.approx(1, abs=0.1)


def test_what_leaves_the_gpu_is_what_the_plan_says_and_comes_back() -> None:
    model = _plan.named_model("opt-1.3b", batch=32)
    here = machine("host_bytes=7 GB", "ssd_count=12")
    placement = _placement.place(model, here, "lohan")
    fates = list(zip(model.layers, placement.fates, strict=True))
    assert {"host", "ssd"} <= set(placement.fates)
    swapped = sum(layer.activation_bytes for layer, fate in fates if fate in ("host", "ssd"))
    step = simulate(model, here, Options("lohan"))
    assert step.swapped_bytes == pytest.approx(swapped, rel=0.01)
    again = sum(layer.forward_flop for layer, fate in fates if fate == "recompute")
    params_bytes = 2 * model.param_count
    assert step.resources["link_out"].nbytes == pytest.approx(swapped + params_bytes, rel=0.01)
    assert step.recompute_flop <= again


def test_recomputation_lengthens_backward_by_its_flop() -> None:
    model = _plan.named_model(**SMALL)
    here = machine("host_bytes=8 GB", "ssd_count=1")
    placement = _placement.place(model, here, "lohan")
    again = placement.recompute_flop
    assert again > 0
    compute_ns = sum(part[0] + part[1] for _, parts, _ in placement.blocks for part in parts)
    expected_ns = (3 * model.forward_flop + again) * 10**9 // here.gpu_flop_per_s
    assert compute_ns == pytest.approx(expected_ns, abs=3 * len(model.layers))


def test_what_leaves_is_spread_over_the_blocks() -> None:
    placement = _placement.place(_plan.named_model("gpt-13b", batch=32), machine(), "lohan")
    moved = [
        sum(nbytes for *_, saved in parts for nbytes, _ in saved)
        for _, parts, _ in placement.blocks[1:-1]
    ]
    assert len(set(moved)) > 1, "one kind of layer is swapped in part"
    stretches = [sum(moved[i : i + 8]) for i in range(0, len(moved), 8)]
    assert max(stretches) < 1.3 * min(stretches)


@pytest.mark.parametrize("ssd_count", [1, 4])
@pytest.mark.parametrize("host_bytes", ["12 GB", "64 GB"])
def test_auto_is_not_slower_than_the_papers_policy(ssd_count: int, host_bytes: str) -> None:
    model = _plan.named_model("opt-1.3b", batch=32)
    here = machine(f"ssd_count={ssd_count}", f"host_bytes={host_bytes}")
    papers = simulate(model, here, Options("lohan"))
    assert simulate(model, here, Options("auto")).step_ns < 1.02 * papers.step_ns


@pytest.mark.parametrize("ssd_count", [1, 3])
def test_by_auto_updates_wait_for_the_next_forward_only_where_that_pays(ssd_count: int) -> None:
    model = _plan.named_model("opt-1.3b", batch=16)
    here = machine(f"ssd_count={ssd_count}", "host_bytes=12 GB")
    both = simulate(model, here, Options("auto"))
    eager = simulate(model, here, Options("auto", without=("deferred",)))
    if ssd_count == 1:  # the timeline's choice waits there, and takes longer
        assert _placement.place(model, here, "auto").schedule == "auto"
        assert both.step_ns == eager.step_ns
    else:
        assert both.step_ns < eager.step_ns


def test_a_step_bears_its_share_of_what_the_commit_costs() -> None:
    model = _plan.named_model(**SMALL)
    here = machine("ssd_count=1", "host_bytes=12 GB")
    each, third, rare = (simulate(model, here, Options("auto", None, n)) for n in (1, 3, 1000))
    assert each.commit_ns == 0
    # Each commit writes what was not written between commits; so does each step if all are
    # committed.
    extra_bytes = (third.ssd_write_bytes - rare.ssd_write_bytes) / (1 / 3 - 1 / 1000)
    between_bytes = rare.ssd_write_bytes - extra_bytes / 1000
    assert extra_bytes > 5e9
    assert between_bytes + extra_bytes == pytest.approx(each.ssd_write_bytes, rel=1e-4)
    assert rare.commit_ns / 1e9 == pytest.approx(extra_bytes / here.ssd_write_bytes_per_s, rel=0.3)
    assert third.step_ns - rare.step_ns == pytest.approx(rare.commit_ns * (1 / 3 - 1e-3), rel=0.05)


def test_by_auto_commits_take_half_a_percent_of_the_time() -> None:
    here = machine("ssd_count=1", "host_bytes=12 GB")
    step = simulate(_plan.named_model(**SMALL), here, Options("auto"))
    share = step.commit_ns / step.commit_every / step.step_ns
    assert step.commit_every > 10 and share == pytest.approx(0.005, rel=0.1)
    assert simulate(_plan.named_model(**SMALL), here, Options("lohan")).commit_every == 1


def test_by_auto_nothing_goes_to_ssd_that_main_memory_has_room_for() -> None:
    model = _plan.named_model("gpt-13b", batch=32)
    roomy = _placement.place(model, machine("host_bytes=736 GB"), "auto")
    assert "ssd" not in roomy.fates and "host" in roomy.fates
    assert roomy.engine_bytes + roomy.saved_bytes == machine("host_bytes=736 GB").host_bytes


def test_what_a_plan_takes_of_memory_is_there() -> None:
    here = machine("host_bytes=20 GB", "ssd_count=4")
    for batch, policy in itertools.product((1, 8, 32), _core.plan_policies()):
        model = _plan.named_model("opt-6.7b", batch=batch)
        placement = _placement.place(model, here, policy)
        gpu = placement.slot_bytes + placement.room_bytes + placement.computing_bytes
        assert gpu <= here.gpu_bytes
        assert placement.engine_bytes + placement.saved_bytes <= here.host_bytes


def test_tflops_and_tokens_are_of_the_step() -> None:
    found = answer("--model", "opt-1.3b", "--batch", "4", "--machine", "paper-4090")
    step_s = found["step_ms"] / 1000
    assert found["tokens_per_s"] == pytest.approx(4 * 1024 / step_s)
    assert found["tflops"] == pytest.approx(3 * found["forward_flop"] / step_s / 1e12)
    written = found["ssd_write_bytes"] * 86400 / step_s
    assert found["written_bytes_per_day"] == pytest.approx(written, rel=1e-6)
    assert found["ssd_life_days"] == pytest.approx(12 * 7e15 / written, rel=1e-6)
    assert {"gpu", "ssd", "ssd_bus", "link_in", "link_out", "cpu"} == found["resources"].keys()
    assert found["bound_by"] in found["resources"]
    assert found["peak_bytes"].keys() == {"gpu", "host", "ssd"}
    assert "swapped_bytes" in found and "recompute_flop" in found


def test_a_sweep_is_the_steps_one_by_one() -> None:
    words = ("--model", "opt-1.3b", "--batch", "4", "--machine", "paper-4090")
    rows = answer(*words, "--sweep", "ssd_count=1..3")["sweep"]
    assert [row["ssd_count"] for row in rows] == [1, 2, 3]
    assert rows[2]["step_ms"] == answer(*words, "--set", "ssd_count=3")["step_ms"]
    assert rows[0]["step_ms"] > rows[1]["step_ms"]
    # Two SSDs do not bound a step between commits any more.
    between = [row["step_ms"] - row["commit_ms"] / row["commit_every"] for row in rows]
    assert between[2] == pytest.approx(between[1], rel=1e-4)
    batches = answer(*words, "--sweep", "batch=2,4")["sweep"]
    assert batches[1]["step_ms"] == answer(*words)["step_ms"]


def test_a_sweep_is_drawn(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "a.svg"
    shown = run("--model", "opt-1.3b", "--sweep", "batch=1,2", "--plot", str(picture))
    assert shown.exit_code == 0, shown.output
    assert "<svg" in picture.read_text()


def test_swapping_more_and_more_is_drawn_with_the_policys_choice(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "a.svg"
    words = ("--model", "opt-1.3b", "--batch", "16", "--machine", "paper-4090")
    found = answer(*words, "--policy", "lohan", "--plot", str(picture))
    assert "<svg" in picture.read_text()
    amounts = [point["swapped_bytes"] for point in found["swap_curve"]]
    again = [point["recompute_flop"] for point in found["swap_curve"]]
    assert amounts == sorted(amounts) and again == sorted(again, reverse=True)
    model = _plan.named_model("opt-1.3b", batch=16)
    assert amounts[0] == pytest.approx(model.inter_block_bytes, rel=0.01)
    assert amounts[-1] == pytest.approx(model.activation_bytes, rel=0.01)
    assert again[-1] == 0


def test_people_are_told_what_bounds_a_step_and_what_is_not_simulated() -> None:
    shown = run("--model", "opt-1.3b", "--machine", "laptop", "--policy", "lohan")
    assert shown.exit_code == 0, shown.output
    for words in ("tokens/s", "bound by: SSDs", "written per day", "swapped out of the GPU"):
        assert words in shown.stdout


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_long_simulation_ends_at_a_signal() -> None:
    class Woken(Exception):
        pass

    def wake(_: int, frame: types.FrameType | None) -> None:
        # Not in pytest's own code: on a slow machine another signal comes before that is done.
        while frame is not None:
            if frame.f_code.co_filename.endswith("lohan/simulate.py"):
                raise Woken
            frame = frame.f_back

    ended = threading.Event()
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def signals() -> None:
        # Python drops an exception in a weak reference's callback, so another one follows.
        while not ended.wait(0.3):
            signal.pthread_kill(main_thread, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, wake)
    sender = threading.Thread(target=signals)
    began = time.monotonic()
    try:
        with pytest.raises(Woken):
            sender.start()
            simulate(
                _plan.named_model("gpt-805b", batch=1), machine("gpu_bytes=1 TB", "ssd_bytes=1 PB")
            )
        took = time.monotonic() - began
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        ended.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    assert took < 5 * slowness()


# --- machines and models ------------------------------------------------------------------------


def test_a_machine_file_that_is_nested_too_deeply_is_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text(f"host_bytes = {'[' * 5000}{']' * 5000}\n")
    with pytest.raises(MachineError, match=r"deep\.toml: its values are nested too deeply"):
        _machines.load(str(path))


@pytest.mark.parametrize("name", _machines.names())
def test_every_preset_is_a_machine_that_trains(name: str) -> None:
    one = dataclasses.replace(_machines.load(name), node_count=1, gpu_count=1)
    step = simulate(_plan.named_model("opt-1.3b", batch=1), one)
    assert step.tflops > 0


def test_the_presets_are_those_that_are_documented() -> None:
    text = (GOLDEN.parents[2] / "docs" / "machines.md").read_text()
    for name in _machines.names():
        assert f"`{name}`" in text
    for field in dataclasses.fields(_machines.Machine):
        assert f"`{field.name}`" in text


@pytest.mark.parametrize(
    ("name", "value", "number"),
    [
        ("ssd_read_bytes_per_s", "6.5 GB/s", 6_500_000_000),
        ("gpu_bytes", "24GiB", 24 << 30),
        ("gpu_flop_per_s", "155 TFLOP/s", 155 * 10**12),
        ("adam_params_per_s", 1.1e9, 1_100_000_000),
        ("ssd_latency_ns", "80 us", 80_000),
        ("ssd_count", "12", 12),
        ("host_bytes", "1e9", 10**9),
    ],
)
def test_a_quantity_is_read_in_its_unit(name: str, value: str | float, number: int) -> None:
    assert _machines.quantity(name, value) == number


@pytest.mark.parametrize(
    "change",
    [
        "ssd_read_bytes_per_s=6.5 GB",
        "gpu_bytes=24 parsecs",
        "ssd_count=1.5",
        "ssd_count=0",
        "ssd_count=17",
        "host_bytes=-1",
        "host_bytes=nan",
        "host_bytes=1e30",
        "gpu_flop_per_s=true",
        "no_such_field=1",
        "ssd_count",
    ],
)
def test_an_unknown_change_is_refused_by_its_name(change: str) -> None:
    with pytest.raises(MachineError, match=change.partition("=")[0]):
        machine(change)


def test_a_file_says_what_it_lacks_and_what_it_has_too_much_of(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nssd_count = 2\n')
    with pytest.raises(MachineError, match=r"mine\.toml: gpu_flop_per_s, .* missing"):
        _machines.load(str(path))
    path.write_text("ssd_count = \n")
    with pytest.raises(MachineError, match=r"mine\.toml"):
        _machines.load(str(path))
    with pytest.raises(MachineError, match="Presets: gaming-pc"):
        _machines.load(str(tmp_path / "none.toml"))
    text = "\n".join(
        f'{key} = "{value}"' if key == "name" else f"{key} = {value}"
        for key, value in dataclasses.asdict(machine("ssd_count=3")).items()
    )
    path.write_text(text)
    assert _machines.load(str(path)) == machine("ssd_count=3")
    path.write_text(text + "\nflux = 3\n")
    with pytest.raises(MachineError, match="'flux' is not a field"):
        _machines.load(str(path))


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "gpt-14b"), "gpt-13b"),
        (("--model", "gpt-13b", "--machine", "toaster"), "Presets: "),
        (("--model", "opt-1.3b", "--batch", "400"), "smaller batch"),
        (("--model", "opt-1.3b", "--plot", "a.no"), "cannot be written"),
        (("--model", "gpt-13b", "--set", "host_bytes=100 MB"), "host_bytes"),
        (
            ("--model", "gpt-175b", "--machine", "laptop", "--set", "ssd_bytes=9 TB"),
            "smaller batch",
        ),
        (("--model", "gpt-70b", "--set", "ssd_bytes=1 TB"), "raise ssd_count"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(words: tuple[str, ...], said: str) -> None:
    result = run(*words)
    assert result.exit_code == 1 and "Traceback" not in result.output
    assert said in result.output, result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--schedule", "never"), "'never' must be one of optimized, serial"),
        (("--policy", "eat"), "lohan"),
        (("--states", "2bit"), "fp32, bf16, 8bit, 4bit"),
        (("--order", "diagonal"), "horizontal, vertical"),
        (("--base", "nf5"), "nf4"),
        (("--loss", "none"), "logits, linear_cross_entropy"),
        (("--commit-every", "0"), "0 is not in the range x>=1"),
        (("--batch", "0"), "0 is not in the range x>=1"),
        (("--sweep", "ssd_count"), "ssd_count=1..12"),
        (("--sweep", "color=1,2"), "one of batch"),
        (("--sweep", "batch=1..100"), "1 to 64 values"),
        (("--sweep", "batch=0,8"), "batch=0 must be at least 1"),
    ],
)
def test_an_option_without_such_a_value_is_a_wrong_command_line(
    words: tuple[str, ...], said: str
) -> None:
    result = run("--model", "gpt-13b", *words)
    assert result.exit_code == 2 and result.stderr.startswith("Usage: ")
    assert said in " ".join(result.stderr.split()), result.stderr
    assert result.stdout == ""
    result = run("--model", "gpt-13b", *words, "--json")
    error = json.loads(result.stdout)["error"]
    assert result.exit_code == 2 and error["type"] == "BadParameter" and said in error["message"]


def core_call(**changes: object) -> object:
    machine_numbers = {
        "ssd_count": 1,
        "ssd_read_bytes_per_s": 10**9,
        "ssd_write_bytes_per_s": 10**9,
        "ssd_total_bytes_per_s": 0,
        "ssd_latency_ns": 1000,
        "ssd_queue_depth": 8,
        "ssd_sync_ns": 1000,
        "worker_count": 1,
        "worker_bytes_per_s": 10**9,
        "device_bytes": 0,
        "copy_in_bytes_per_s": 1,
        "copy_out_bytes_per_s": 1,
        "copy_latency_ns": 0,
    }
    words: dict = {
        "units": [("float32", False, 5000)],
        "blocks": [((0,), ((1000, 2000, ((5000, False),)),))],
        "machine": machine_numbers,
        "saved": {**dict.fromkeys(SAVED, 1 << 20), "memory_bytes": 1 << 22},
        "host_bytes": 1 << 26,
        "schedule": 0,
        "commit_every": 1,
        "io_depth": 4,
        "transfer_bytes": 1 << 20,
        "only_checks": False,
        "raiser": lambda code, message, is_rule: LohanError(message),
    }
    for name, value in changes.items():
        if name in machine_numbers:
            machine_numbers[name] = value
        else:
            words[name] = value
    return _core.simulate(**words)


def test_what_leaves_and_comes_back_has_the_room_that_the_block_which_computes_leaves() -> None:
    saved = ((1 << 18, False),) * 3

    def step_ns(*rooms: int) -> int:
        blocks = [((), ((100_000, 200_000, saved),), room) for room in rooms]
        blocks[0] = ((0,), *blocks[0][1:])
        return core_call(
            blocks=blocks,
            saved={**dict.fromkeys(SAVED, 1 << 20), "memory_bytes": 1 << 23},
            device_bytes=1 << 22,
            copy_in_bytes_per_s=10**10,
            copy_out_bytes_per_s=10**10,
        )["step_ns"]

    tight, roomy, mixed = step_ns(1, 1, 1), step_ns(1 << 22, 1 << 22, 1 << 22), step_ns(0, 1, 0)
    assert roomy < mixed < tight, (roomy, mixed, tight)
    # The copies of all blocks except the last are hidden by the others' computation.
    assert step_ns(1 << 22, 1 << 22, 1) < tight


@pytest.mark.parametrize("slowness", [100, 1000])
def test_activations_whose_writes_last_into_the_next_step_are_simulated(slowness: int) -> None:
    """The SSD writes so slowly that dropped tensors are still being written a step later."""
    blocks = [((i,), ((1000, 2000, ((1 << 16, True),)),)) for i in range(4)]
    made = core_call(
        units=[("float32", False, 51200)] * 4,
        blocks=blocks,
        saved={**dict.fromkeys(SAVED, 2 << 20), "memory_bytes": 4 << 20, "ssd_bytes": 48 << 20},
        ssd_write_bytes_per_s=10**9 // slowness,
        device_bytes=768 << 10,
        copy_in_bytes_per_s=10**9,
        copy_out_bytes_per_s=2 * 10**9,
        host_bytes=11_141_440,
        io_depth=16,
        transfer_bytes=4 << 20,
    )
    assert made["bytes"]["saved_out"] == 4 << 16


def test_room_for_activations_that_nothing_of_a_plan_uses_costs_nothing() -> None:
    blocks = [((0,), ((1000, 2000, ()),))]
    without = core_call(blocks=blocks, saved=dict.fromkeys(SAVED, 0))
    assert core_call(blocks=blocks)["step_ns"] == without["step_ns"]


@pytest.mark.parametrize(
    "changes",
    [
        {"ssd_count": 0},
        {"ssd_count": 17},
        {"ssd_read_bytes_per_s": 0},
        {"worker_count": 1 << 40},
        {"ssd_latency_ns": 1 << 62},
        {"device_bytes": 1 << 63},
        {"units": []},
        {"units": [("int8", False, 5)]},
        {"units": [("float32", False, 0)]},
        {"units": [("float32", False, 1 << 62)]},
        {"blocks": []},
        {"blocks": [((1,), ((0, 0, ()),))]},
        {"blocks": [((0,), ((1 << 62, 0, ()),))]},
        {"blocks": [((0, 0, 0, 0, 0), ((0, 0, ()),))]},
        {"blocks": [((0,), ())]},
        {"blocks": [((0,), ((0, 0, ((0, True),)),))]},
        {"blocks": [((0,), ((0, 0, ((1 << 60, True),)),))]},
        {"schedule": 5},
        {"io_depth": 0},
        {"transfer_bytes": 4096},
    ],
)
def test_the_binding_refuses_numbers_that_no_simulation_could_bear(changes: dict) -> None:
    assert core_call()["step_ns"] > 3000
    with pytest.raises((ValueError, OverflowError)):
        core_call(**changes)


def test_the_bindings_dict_must_have_every_number() -> None:
    with pytest.raises(ValueError, match="a machine has no 'ssd_count'"):
        core_call(machine={})


def test_a_budget_error_is_one() -> None:
    with pytest.raises(BudgetError, match=r"(raise|set) host_bytes"):
        simulate(_plan.named_model(**SMALL), machine("host_bytes=50 MB"))


@pytest.mark.parametrize("switch", ["residuals", "deferred", "host_states", "kept"])
def test_what_auto_does_without_is_not_in_its_plan(switch: str) -> None:
    model = _plan.named_model("opt-1.3b", batch=32)
    here = machine("ssd_count=1", "host_bytes=16 GB")
    placement = _placement.place(model, here, "auto", without=(switch,))
    plan = _policies.make(model, here, "auto" + _placement.SWITCHES[switch])
    kept = {f for m, f in zip(model.layers, plan["layers"], strict=True) if m.activation_bytes}
    has = {
        "residuals": placement.dtype == "bfloat16",
        "deferred": any(block["is_deferred"] for block in plan["blocks"]),
        "host_states": any(block["has_host_p16"] for block in plan["blocks"])
        or placement.engine_bytes > here.host_bytes // 2,
        "kept": "keep" in kept,
    }
    assert not has[switch]
    with pytest.raises(MachineError, match="without"):
        simulate(model, here, Options("auto", without=("speed",)))
    with pytest.raises(MachineError, match="auto/slow"):
        _policies.make(model, here, "auto/slow")
