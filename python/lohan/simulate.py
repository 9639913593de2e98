"""Simulate a training step on a machine that you need not have: lohan's engine in virtual time.

The simulation runs the same engine as training, but models links and workers only by their rates
(docs/simulator.md lists what this leaves out). Numbers of bytes are therefore exact, and times
follow from the machine's rates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lohan import _core
from lohan.common import _keywords
from lohan.common._rules import RULES
from lohan.common._stats import READS, WRITES
from lohan.errors import BudgetError, MachineError
from lohan.layout._block import RESIDUAL_BYTES, STATES
from lohan.opening._combination import rule_of
from lohan.planning import _base, _machines, _models, _simulate_timeline
from lohan.planning._engine import (
    RARELY,
    SCHEDULES,
    arguments,
    rare_commits,
    worker_bytes_per_s,
)
from lohan.planning._pieces import NS_PER_S, capacity_check, frozen_params, matrix_bytes
from lohan.planning._placement import SWITCHES, Turns, place

if TYPE_CHECKING:
    from lohan.planning._machines import Machine
    from lohan.planning._placement import Placement
    from lohan.planning._plan import Model
    from lohan.planning._simulate_timeline import Timeline

_SECONDS_PER_DAY = 86400
# A trained parameter and its states are in two slots: the committed one, and the one being written.
ORDERS = ("horizontal", "vertical")
# A sum of gradients in fp32 is read and written for each of them: csrc/sched/sum.c.
_SUM_BYTES_MOVED = 8
# The number of events to keep for a picture. It is enough for two steps, because requests are
# seldom smaller than _TRACE_EVENT_BYTES.
_TRACE_COUNT_LEAST = 1 << 16
_TRACE_COUNT_MAX = 1 << 24
_TRACE_EVENT_BYTES = 1 << 20
_STEP_BYTES_PER_PARAM = 32

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Options:
    """The settings of a simulated run.

    Attributes:
        policy: decides where activations and states are kept (docs/planning.md).
        schedule: the schedule of updates, as in `lohan.wrap`. None: the policy's schedule.
        commit_every: the number of steps between commits. None: every step commits; with `auto`,
            commits are as rare as commit_every="auto" of `lohan.wrap` makes them.
        swap_share: the share of the activations inside blocks that are offloaded from the GPU, in
            the order of decreasing benefit; the rest is recomputed. None: the policy decides.
        without: the features to disable, of those that `auto` adds to the paper's policy
            (SWITCHES).
        states: how moments are stored, as `moments=` of `lohan.wrap`: "fp32", "bf16", "8bit"
            or "4bit".
        method: the update rule, as in `lohan.wrap`: "adamw", "lion", lohan.SGD(momentum=0.9), ...
            The names of `lohan plan --method` are accepted, too.
        accumulate: the number of micro-batches in a step; the model is at the size of one.
        order: the order of the micro-batches, "horizontal" or "vertical", as in `lohan.wrap`.
    """

    policy: str = "auto"
    schedule: str | None = None
    commit_every: int | None = None
    swap_share: float | None = None
    without: tuple[str, ...] = ()
    states: str = "fp32"
    method: str | _keywords.SGD = "adamw"
    accumulate: int = 1
    order: str = "horizontal"

    @property
    def rule(self) -> str:
        """The update rule: a key of RULES, unless _check_options() refuses the method."""
        if isinstance(self.method, str):
            return self.method
        named = _keywords.flat({"method": self.method})
        method: str = named["method"]
        return rule_of(method, named.get("momentum")) if method in RULES else method

    def of(self, model: Model) -> Model:
        """Return the model with the moments of the run."""
        return model.with_rule(self.rule, self.states)

    @property
    def turns(self) -> Turns:
        """The micro-batches of a step."""
        return Turns(self.accumulate, self.accumulate if self.order == "vertical" else 1)

    @property
    def own_schedule(self) -> str | None:
        """The schedule; sums of gradients make every update wait for the end of the step."""
        if self.accumulate == 1 or self.schedule == "serial":
            return self.schedule
        return "deferred"


@dataclasses.dataclass(frozen=True)
class Resource:
    """The use of a link or a processor in one step.

    Attributes:
        nbytes: the bytes that a link moved; None for a processor.
        busy_share: the share of the step that the bytes or the work take at the full rate.
    """

    nbytes: int | None
    busy_share: float


@dataclasses.dataclass(frozen=True)
class Step:
    """The figures of a step in the steady state, with its share of a commit.

    Attributes:
        step_ns: the time from the beginning of the step to that of the next one.
        forward_ns, backward_ns: the times of forward and backward, without a commit.
        schedule: when updates run, as `schedule` of `lohan.wrap`.
        commit_every: the number of steps between commits.
        commit_ns: the time that a commit adds, once in commit_every steps.
        tokens: the number of tokens in the step.
        forward_flop, recompute_flop: the GPU's FLOP in forward and for recomputation. Backward
            itself takes twice the FLOP of forward, and as much as forward for products with frozen
            parameters.
        resources: the use of each resource by name: "gpu", "ssd" (all of them), "ssd_bus" (if it
            has a limit), "link_in", "link_out", "cpu".
        ssd_read_bytes, ssd_write_bytes: the bytes that the step reads and writes on all SSDs.
        link_bytes: the bytes over each link of the engine, as `lohan.StepStats.bytes` has them.
        swapped_bytes: the size of the activations that were offloaded from the GPU.
        saved_bytes: their room: in main memory ("host"), in its staging buffer for those on their
            way to and from SSD ("transit"), and on SSD ("ssd").
        peak_bytes: the peak use of each tier: "gpu", "host", "ssd".
        ssd_life_days: how long the SSDs last; None if the machine does not define their endurance.
    """

    step_ns: int
    forward_ns: int
    backward_ns: int
    schedule: str
    commit_every: int
    commit_ns: int
    tokens: int
    forward_flop: int
    recompute_flop: int
    resources: dict[str, Resource]
    ssd_read_bytes: int
    ssd_write_bytes: int
    link_bytes: dict[str, int]
    swapped_bytes: int
    saved_bytes: dict[str, int]
    peak_bytes: dict[str, int]
    ssd_life_days: float | None

    @property
    def tokens_per_s(self) -> float:
        """The tokens trained per second."""
        return self.tokens * NS_PER_S / self.step_ns

    @property
    def tflops(self) -> float:
        """The TFLOP/s: a step counts as 3x the forward FLOP, without recomputation."""
        return 3 * self.forward_flop / self.step_ns / 1000

    @property
    def bound_by(self) -> str:
        """The busiest resource."""
        return max(self.resources, key=lambda name: self.resources[name].busy_share)

    @property
    def written_bytes_per_day(self) -> int:
        """The bytes written to all SSDs in a day of uninterrupted training."""
        return self.ssd_write_bytes * _SECONDS_PER_DAY * NS_PER_S // self.step_ns

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them."""
        return {
            "step_ms": self.step_ns / 1e6,
            "forward_ms": self.forward_ns / 1e6,
            "backward_ms": self.backward_ns / 1e6,
            "schedule": self.schedule,
            "commit_every": self.commit_every,
            "commit_ms": self.commit_ns / 1e6,
            "tokens_per_s": self.tokens_per_s,
            "tflops": self.tflops,
            "forward_flop": self.forward_flop,
            "recompute_flop": self.recompute_flop,
            "swapped_bytes": self.swapped_bytes,
            "saved_bytes": self.saved_bytes,
            "ssd_read_bytes": self.ssd_read_bytes,
            "ssd_write_bytes": self.ssd_write_bytes,
            "link_bytes": self.link_bytes,
            "resources": {
                name: {"bytes": resource.nbytes, "busy_share": resource.busy_share}
                for name, resource in self.resources.items()
            },
            "bound_by": self.bound_by,
            "peak_bytes": self.peak_bytes,
            "written_bytes_per_day": self.written_bytes_per_day,
            "ssd_life_days": self.ssd_life_days,
        }


def _commit_every(raw: dict[str, Any], options: Options, machine: Machine) -> int:
    """Return the number of steps between commits; by default, it follows from a commit's cost."""
    if options.commit_every is not None:
        return options.commit_every
    return rare_commits(raw, machine) if _is_rare(options) else 1


def _resources(
    raw: dict[str, Any], machine: Machine, step_ns: float, written: int, work: tuple[int, float]
) -> dict[str, Resource]:
    """Return the use of each resource; work: the GPU's FLOP, and the CPU's seconds."""
    nbytes = raw["bytes"]
    flop, cpu_s = work
    step_s = step_ns / NS_PER_S
    read = sum(nbytes[name] for name in READS)
    ssd_s = read / machine.ssd_read_bytes_per_s + written / machine.ssd_write_bytes_per_s
    inward = nbytes["copy_in"] + nbytes["saved_in"]
    outward = nbytes["copy_out"] + nbytes["saved_out"]
    found = {
        "gpu": Resource(None, flop / machine.gpu_flop_per_s / step_s),
        "ssd": Resource(read + written, ssd_s / machine.ssd_count / step_s),
        "link_in": Resource(inward, inward / machine.link_in_bytes_per_s / step_s),
        "link_out": Resource(outward, outward / machine.link_out_bytes_per_s / step_s),
        "cpu": Resource(None, cpu_s / step_s),
    }
    if machine.ssd_total_bytes_per_s:
        bus_s = (read + written) / machine.ssd_total_bytes_per_s
        found["ssd_bus"] = Resource(read + written, bus_s / step_s)
    return found


def _is_rare(options: Options) -> bool:
    """Return whether commits are rare by default."""
    return options.policy == "auto" and "host_states" not in options.without


def _check_options(options: Options) -> None:
    if options.schedule not in (None, *SCHEDULES):
        raise MachineError(f"schedule {options.schedule!r}: must be one of {', '.join(SCHEDULES)}")
    if options.commit_every is not None and options.commit_every < 1:
        raise MachineError(f"commit_every = {options.commit_every}: must be at least 1")
    if options.states not in STATES:
        raise MachineError(f"states {options.states!r}: must be one of {', '.join(STATES)}")
    if options.rule not in RULES:
        raise MachineError(f"method {options.method!r}: must be one of {', '.join(RULES)}")
    rule = RULES[options.rule]
    if options.states not in rule.formats:
        kept = f"whose moments may be {', '.join(rule.formats)}"
        raise MachineError(
            f"moments {options.states!r} cannot be combined with {rule.title},"
            f" {kept if rule.moments else 'which has none'}: leave it out"
        )
    if options.accumulate < 1:
        raise MachineError(f"accumulate = {options.accumulate}: must be at least 1")
    if options.order not in ORDERS:
        raise MachineError(f"order {options.order!r}: must be one of {', '.join(ORDERS)}")
    if options.order == "vertical" and options.accumulate == 1:
        raise MachineError('order "vertical" needs several micro-batches: accumulate is 1')
    if options.order == "vertical" and options.policy != "auto":
        raise MachineError(
            f'order "vertical" has no policy for activations, so policy {options.policy!r} cannot'
            ' be combined with it: leave "auto"'
        )
    if not set(options.without) <= set(SWITCHES):
        raise MachineError(f"without {options.without}: must be a subset of {', '.join(SWITCHES)}")


def _tries(model: Model, options: Options) -> list[Options]:
    """Return the variants to simulate; with `auto`, some of them lack some of its features.

    With a frozen base, one of them has main memory for activations before it has any for the base:
    then nothing but adapters is written to SSD, and the base is read more often.
    """
    found = [options]
    if options.policy != "auto" or options.swap_share is not None or options.turns.visits > 1:
        return found
    if "deferred" not in options.without:
        found.append(dataclasses.replace(options, without=(*options.without, "deferred")))
    if not options.without:
        found.append(dataclasses.replace(options, policy="lohan"))
    if model.frozen_count and "ssd_activations" not in options.without:
        without = (*options.without, "ssd_activations")
        found.append(dataclasses.replace(options, without=without))
    return found


def _run(
    model: Model,
    machine: Machine,
    options: Options,
    only_checks: bool = False,
    trace_count: int = 0,
) -> tuple[Placement, dict[str, Any]]:
    # First check with the smallest possible states: if the SSDs have no room for them, an error of
    # place() would suggest more of another memory, instead of SSD space.
    model = options.of(model).on(machine.worker_count, machine.adam_params_per_s)
    capacity_check(model, machine, 0)
    turns = options.turns
    placement = place(model, machine, options.policy, options.swap_share, options.without, turns)
    residual_bytes = RESIDUAL_BYTES[getattr(torch, placement.dtype)]
    capacity_check(model, machine, residual_bytes, placement.ssd_bytes)
    raw = _core.simulate(
        **arguments(model, machine, placement),
        host_bytes=placement.engine_bytes,
        schedule=SCHEDULES.index(options.own_schedule or placement.schedule),
        micro_steps=turns.count // turns.visits if turns.count > 1 else 0,
        visits=turns.visits,
        commit_every=options.commit_every or (RARELY if _is_rare(options) else 1),
        only_checks=only_checks,
        trace_count=trace_count,
    )
    return placement, raw


def _fitting(model: Model, options: Options, run: Callable[[Options], _T]) -> Iterator[_T]:
    """Yield run()'s result for each variant that fits; if none does, raise the first error."""
    refusal: BudgetError | None = None
    has_fitted = False
    for tried in _tries(model, options):
        try:
            given = run(tried)
        except BudgetError as error:
            refusal = refusal or error
            continue
        has_fitted = True
        yield given
    if refusal and not has_fitted:
        raise refusal


def check(model: Model, machine: Machine, options: Options) -> None:
    """Check that the model fits the machine, without simulating a step.

    Raises:
        BudgetError: the model does not fit the machine; the message has the numbers.
        MachineError: an option is invalid.
    """
    _check_options(options)
    next(_fitting(model, options, lambda tried: _run(model, machine, tried, True)))


def _fastest(model: Model, machine: Machine, options: Options) -> tuple[Step, Options]:
    def run(tried: Options) -> tuple[Step, Options]:
        placement, raw = _run(model, machine, tried)
        return _step(model, machine, placement, raw, tried), tried

    _check_options(options)
    ranks = machine.node_count * machine.gpu_count
    if ranks > 1:
        raise MachineError(
            f"{machine.name} has {ranks} GPUs, and the engine is simulated on one: set node_count=1"
            " and gpu_count=1"
        )
    return min(_fitting(model, options, run), key=lambda found: found[0].step_ns)


def simulate(model: Model, machine: Machine, options: Options | None = None) -> Step:
    """Simulate training in virtual time until its steps repeat, and return the figures of a step.

    With `auto`, three plans are simulated: its own with and without deferred updates, and that of
    policy "lohan"; with frozen parameters also its own without activations on SSD. The fastest step
    is returned.

    Args:
        model: the model at one batch size.
        machine: the machine to simulate.
        options: the settings of the run; None means the defaults.

    Raises:
        BudgetError: the model does not fit the machine; the message has the numbers.
        MachineError: an option is invalid, or the machine has several GPUs.
    """
    return _fastest(model, machine, options or Options())[0]


def simulate_traced(
    model: Model, machine: Machine, options: Options | None = None
) -> tuple[Step, Timeline]:
    """Simulate a step as simulate() does, and also return how busy each resource is over time.

    Args:
        model: the model at one batch size.
        machine: the machine to simulate.
        options: the settings of the run; None means the defaults.

    Raises:
        BudgetError, MachineError: as simulate().
    """
    options = options or Options()
    moved = _STEP_BYTES_PER_PARAM * model.param_count + 2 * model.activation_bytes
    count = _TRACE_COUNT_LEAST + options.accumulate * moved // _TRACE_EVENT_BYTES
    count = min(count, _TRACE_COUNT_MAX)
    step, tried = _fastest(model, machine, options)
    _, raw = _run(model, machine, tried, trace_count=count)
    return step, _simulate_timeline.make(raw, machine)


def _cpu_s(model: Model, machine: Machine, raw: dict[str, Any], options: Options) -> float:
    """Return how long all workers together take for AdamW, sums of gradients, and decoding."""
    update_s = raw["update_busy_ns"] / machine.worker_count / NS_PER_S
    sums = options.accumulate * model.param_count if options.accumulate > 1 else 0
    decoded = 0.0
    if model.base != _base.PLAIN:
        frozen = [frozen_params(block) for block in model.blocks]
        once = model.param_count * model.param_bytes
        once += sum(model.frozen_read_bytes(*count) for count in frozen)
        loads = raw["bytes"]["param_read"] / once  # the mean over all units
        decoded = loads * sum(model.frozen_bytes(*count) for count in frozen if count[0])
    moved = sums * (model.param_bytes + _SUM_BYTES_MOVED) + decoded
    return float(update_s) + moved / worker_bytes_per_s(machine, model)


def _step(
    model: Model, machine: Machine, placement: Placement, raw: dict[str, Any], options: Options
) -> Step:
    commit_every = _commit_every(raw, options, machine)
    count = options.accumulate
    step_ns = raw["step_ns"] + raw["commit_ns"] // commit_every
    written = sum(raw["bytes"][name] for name in WRITES) + raw["commit_write_bytes"] // commit_every
    endurance = machine.ssd_count * machine.ssd_endurance_bytes
    life_s = endurance / written * step_ns / NS_PER_S if endurance and written else None
    flop = count * (model.forward_flop + model.backward_flop + placement.recompute_flop)
    work = flop, _cpu_s(model, machine, raw, options)
    gpu_bytes = placement.slot_bytes + placement.room_bytes + placement.computing_bytes
    return Step(
        step_ns=step_ns,
        forward_ns=raw["forward_ns"],
        backward_ns=raw["backward_ns"],
        schedule=options.own_schedule or placement.schedule,
        commit_every=commit_every,
        commit_ns=raw["commit_ns"],
        tokens=count * model.tokens,
        forward_flop=count * model.forward_flop,
        recompute_flop=count * placement.recompute_flop,
        resources=_resources(raw, machine, step_ns, written, work),
        link_bytes=raw["bytes"],
        ssd_read_bytes=sum(raw["bytes"][name] for name in READS),
        ssd_write_bytes=written,
        swapped_bytes=raw["bytes"]["saved_out"],
        saved_bytes={
            "host": placement.saved_bytes - placement.transit_bytes,
            "transit": placement.transit_bytes,
            "ssd": placement.ssd_bytes,
        },
        peak_bytes={
            "gpu": gpu_bytes,
            "host": raw["host_bytes"] + placement.saved_bytes + matrix_bytes(model),
            "ssd": raw["ssd_bytes"] + placement.ssd_bytes,
        },
        ssd_life_days=None if life_s is None else life_s / _SECONDS_PER_DAY,
    )


def sweep(
    name: str, values: Sequence[int], load: dict[str, Any], machine: Machine, options: Options
) -> list[tuple[int, Step]]:
    """Simulate a step for each value of the batch, the sequence length or a field of the machine.

    Args:
        name: "batch", "seq" or a field of the machine.
        values: the values to simulate.
        load: the model's name, batch and seq.
        machine: the machine, whose other fields stay the same.
        options: the settings of the run.
    """
    answers = []
    for value in values:
        if name in ("batch", "seq"):
            model, here = _models.load(**{**load, name: value}), machine
        else:
            model, here = _models.load(**load), _machines.change(machine, [f"{name}={value}"])
        answers.append((value, simulate(model, here, options)))
    return answers


def swap_curve(
    model: Model, machine: Machine, options: Options, count: int
) -> list[tuple[float, Step]]:
    """Simulate steps with swap shares from 0 (inter-block activations only) to 1 (everything).

    Args:
        model: the model at one batch size.
        machine: the machine to simulate.
        options: the settings of the run; swap_share is ignored.
        count: the number of steps, at least 2; those that do not fit the machine are left out.

    Source: LoHan fig. 9b
    """
    curve = []
    for index in range(count):
        share = index / (count - 1)
        try:
            step = simulate(model, machine, dataclasses.replace(options, swap_share=share))
        except BudgetError:
            continue
        curve.append((share, step))
    return curve
