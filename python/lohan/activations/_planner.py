"""`activations=` with a policy: profile the first steps, make a plan, and follow it in later steps.

A forward of a new shape is run with the conservative plan, which offloads the blocks' inputs if it
can and recomputes everything else, and is profiled. For the first shape of a run, two steps are
profiled, so that the second one runs with warm caches. Profiles are saved beside the store.

Source: LoHan IV-B (profile, then plan), IV-D
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan import _core
from lohan.activations import _offloaded, _profile, _swap
from lohan.activations._foresee import step_s as foreseen_s
from lohan.activations._plan_model import describe
from lohan.activations._profile import Profile, Recorder
from lohan.activations._replay import Assigned, replay
from lohan.activations._shapes import Shape, Shapes
from lohan.config import SCHEDULES_AT_STEP
from lohan.errors import BudgetError, MachineError
from lohan.planning import _policies
from lohan.planning._measure import link_rates, ssd_rates, update_rate
from lohan.planning._pieces import block_params, buffer_bytes
from lohan.planning._plan import Machine
from lohan.torch_glue._tensor import SavedTensors, in_backward, in_transform

if TYPE_CHECKING:
    from lohan.activations._activations import Activations
    from lohan.activations._blocks import Block
    from lohan.activations._plan_model import Item
    from lohan.activations._replay import Outcome
    from lohan.planning._plan import Model
    from lohan.session._training import Training

FILE_NAME = "profile.json"
_ROUNDS_FIRST = 2
# The maximum number of forwards that are profiled before a step ends.
_FORWARD_COUNT_MAX = 256
# The maximum number of forwards whose activations a plan assumes to be in memory at once.
_AT_ONCE_MAX = 8
NS_PER_S = 1_000_000_000
# The share of available memory for activations that stay: in main memory if the CPU computes, and
# on the GPU.
_HOST_SHARE = 0.8
_GPU_SHARE = 0.9
_MODES = {"keep": "keep", "host": "swap", "ssd": "swap", "recompute": "recompute"}
_LEAVES = ("swap", "ssd")
# csrc/plan reserves GPU memory for this many blocks' parameters; lohan has separate slots for them.
_SLOT_BLOCK_COUNT = 2
_ROUNDING_BYTES = 2 << 20
# The device needs room for at least this number of activations in transit.
_ITEMS_ON_THEIR_WAY = 2
# The planners among whose plans `auto` chooses; with /moved, the device keeps no activations.
_AUTO_TRIES = ("auto", "auto/moved", "lohan", "capuchin", "zero")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The mode of each layer for forwards of one shape, and the predicted costs.

    Attributes:
        policy: the policy that the plan follows.
        layers: "keep", "swap", "ssd" or "recompute", by the layer's name.
        inputs: the mode of each block's inputs, by the block's name.
        step_s: the predicted time of a step, in seconds.
        bound_by: the resource that is predicted to be busiest.
        kept_bytes: the size of the activations that stay on the device that computes.
        swapped_bytes: the size of the activations that are offloaded.
        recompute_s: the predicted time of recomputation, in seconds.
        device_bytes: the predicted peak of device memory, which holds parameters, gradients, and
            activations that are kept, recomputed for one block, or in transit.
    """

    policy: str
    layers: dict[str, str]
    inputs: dict[str, str]
    step_s: float
    bound_by: str
    kept_bytes: int
    swapped_bytes: int
    recompute_s: float
    device_bytes: int

    def __str__(self) -> str:
        """Return a one-line summary."""
        modes = collections.Counter(self.layers.values())
        layers = ", ".join(f"{count} {mode}" for mode, count in modes.most_common())
        return (
            f"activations {self.policy!r}: predicted {self.step_s:.3g} s per step, bound by"
            f" {self.bound_by}; layers: {layers}; {self.kept_bytes / 1e6:.1f} MB kept,"
            f" {self.swapped_bytes / 1e6:.1f} MB offloaded, {self.recompute_s:.2g} s recomputation"
        )


@dataclasses.dataclass(frozen=True)
class Made:
    """A plan, and the blocks that implement it.

    Attributes:
        plan: the plan as it is shown to the user.
        blocks: the blocks to be put on the model.
        window_bytes: the bytes of activations that may be in transit at once.
        is_foreseen: whether running the engine in virtual time, not the timeline, predicted step_s.
    """

    plan: Plan
    blocks: list[Block]
    window_bytes: int
    is_foreseen: bool = False


@dataclasses.dataclass
class _Step:
    """The state of the open step."""

    recorder: Recorder | None = None
    forwards: int = 0
    shapes: set[int] = dataclasses.field(default_factory=set)


class Planner:
    """The planner of a session's activations, if its `activations` is a policy.

    Args:
        session: the session, while its hooks are being installed.
        activations: the session's blocks.
    """

    def __init__(self, session: Training, activations: Activations) -> None:
        self.session = weakref.ref(session)
        self.activations = activations
        self.policy = str(session.config.activations)
        self.shapes = Shapes()
        self.shape: Shape | None = None  # the shape of the last forward
        self.step = _Step()
        self.waiting = 0  # the number of forwards that no backward has followed yet
        self.at_once = 1  # the maximum of `waiting` so far
        self.has_profile = False
        self.path = os.path.join(session.directories[0], FILE_NAME)
        self.key = _fingerprint(session, activations)
        self.conservative = activations.make(_conservative(session))
        activations.put(self.conservative)
        if session.config.profile == "reuse":
            self._read()

    # --- The step -----------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Choose the blocks for a forward of the model that is about to begin."""
        session = self.session()
        if session is None or in_backward() or not torch.is_grad_enabled():
            return
        if session.forwards.is_alive():
            return
        session.forwards.refuse_other_thread("the model")
        if in_transform():  # saved tensors can be neither offloaded nor recomputed
            session.forwards.around = session.saving.stay
            self.step.shapes.add(0)  # so that step_end() takes no profile of this step
            return
        key = _profile.key_of(module, args, kwargs)
        shape = self.shapes.of(key, 1 if self.has_profile else _ROUNDS_FIRST)
        self.shape = shape
        self.step.shapes.add(id(shape))
        if module.training:
            self.waiting = min(self.waiting + 1, _AT_ONCE_MAX)
            if self.waiting > self.at_once:  # more activations are in memory at once
                self.at_once = self.waiting
                for other in self.shapes:
                    other.made = None
        if shape.profile is not None and shape.made is None:
            shape.made = self._choose(session, shape, shape.profile)
        if shape.made is not None:
            self._use(session, shape.made)
        elif session.runs.takes_turns:
            self._use_conservative(session)
        else:
            self._record(session)

    def _choose(self, session: Training, shape: Shape, profile: Profile) -> Made | None:
        """Make the policy's plan. Return None if a profile from the file does not fit the model."""
        try:
            return self.choose(session, profile, self.policy)
        except Exception:
            if not shape.is_read:
                raise
            shape.again()
            return None

    def _use(self, session: Training, made: Made) -> None:
        session.forwards.around = session.saving.stay
        session.saving.window_set(made.window_bytes)
        if self.activations.blocks is not made.blocks:
            self.activations.put(made.blocks)

    def _use_conservative(self, session: Training) -> None:
        """Follow no plan in forwards that take turns: a profile is one of a forward at a time."""
        session.forwards.around = session.saving.stay
        session.saving.window_set(None)
        if self.activations.blocks is not self.conservative:
            self.activations.put(self.conservative)

    def _record(self, session: Training) -> None:
        step, stay = self.step, session.saving.stay
        if step.forwards >= _FORWARD_COUNT_MAX:  # the program completes no steps, so begin again
            step = self.step = _Step()
        if step.recorder is None:
            step.recorder = Recorder(session.device.torch_device, has_flops=not self.has_profile)
            session.saving.wait_take_ns()  # discard the waits of previous steps
        recorder = step.recorder
        recorder.begin_forward()
        step.forwards += 1

        def pack(tensor: torch.Tensor) -> Any:
            packed = stay.pack(tensor)
            if not isinstance(packed, _core.Handle):
                recorder.save_outside(tensor)
            return packed

        session.forwards.around = SavedTensors(pack, stay.unpack)
        session.saving.window_set(None)
        self.activations.put(self.activations.make(_conservative(session), recorder.frame))

    def plans_for(self, count: int) -> bool:
        """Return whether forwards like the last one are profiled, so that many may run in turns.

        Args:
            count: how many forwards are to keep activations at once. Plans for fewer are dropped.
        """
        if count > self.at_once:
            self.at_once = count
            for shape in self.shapes:
                shape.made = None
        return self.shape is not None and self.shape.profile is not None

    def backward_end(self) -> None:
        """Handle the end of a backward, which usually frees the tensors that all forwards saved."""
        self.waiting = 0

    def forget(self) -> None:
        """Discard the recording of the open step, which will not be completed."""
        self.step, self.waiting = _Step(), 0

    def step_end(self, session: Training) -> None:
        """Handle the end of a step. If the step was recorded, make a profile from the recording."""
        step, self.step, self.waiting = self.step, _Step(), 0
        recorder, shape = step.recorder, self.shape
        if recorder is None or shape is None:
            return
        self.shapes.mixed(len(step.shapes) > 1)
        if len(step.shapes) > 1:
            return  # the times of accumulated batches of several shapes cannot be separated
        session.flush()
        stats = session.stats()
        visits = recorder.finish()
        if stats.step == 0 or not visits:
            return
        waits = session.saving.wait_take_ns() + stats.param_wait_ns + stats.gradient_wait_ns
        compute_ns = (stats.wall_ns - waits - recorder.again_ns) // step.forwards
        if session.device.name == "cuda":  # waits in the GPU's stream are not visible
            compute_ns = 3 * sum(ns for visit in visits for ns in visit.ns)
        if compute_ns <= 0:
            return  # the step consisted mostly of waits: profile the next one instead
        shape.rounds -= 1
        self.has_profile = True
        if shape.rounds > 0:
            shape.flop = [visit.flop for visit in visits]
            return
        if len(shape.flop) == len(visits):
            for visit, flop in zip(visits, shape.flop, strict=True):
                visit.flop = flop
        seen = Profile(recorder.storages, visits, recorder.outside_only(), compute_ns)
        before = shape.held_up
        if before is None and seen.may_be_held_up():
            shape.held_up = seen
            return
        shape.profile = before if before and before.compute_ns < compute_ns else seen
        shape.profiled, shape.is_read = shape.batch, False
        self._write()

    # --- The plan -----------------------------------------------------------------------------

    def choose(self, session: Training, profile: Profile, policy: str) -> Made:
        """Make a policy's plan for forwards like the one that was profiled.

        With an accelerator, `auto` chooses the fastest of several plans. The engine, run in virtual
        time, predicts their step times; it models more than the timeline that the planners use.

        Raises:
            BudgetError: the policy's plan does not fit. `auto` uses the conservative plan instead.
        """
        if policy != "auto":
            modes = self._planned(session, profile, policy, policy)
            return self.choice(session, profile, modes, policy)
        tried: list[Assigned] = []
        # Virtual time requires an accelerator; on the CPU, use the plan of the first planner.
        for planner in _AUTO_TRIES[: 1 if session.device.name == "cpu" else None]:
            with contextlib.suppress(BudgetError):
                modes = self._planned(session, profile, policy, planner)
                tried += [modes] if modes not in tried else []
        tried = tried or [_conservative(session)]
        made = [self.choice(session, profile, modes, policy) for modes in tried]
        return min(made, key=lambda one: (not one.is_foreseen, one.plan.step_s))

    def _planned(self, session: Training, profile: Profile, policy: str, planner: str) -> Assigned:
        """Return the modes that a planner assigns for this session's machine."""
        model, items = describe(profile, self.activations.places, session.layout)
        machine = machine_of(session, profile, model, planner.partition("/")[0])
        model = model.on(_threads(session), machine.adam_params_per_s)
        try:
            plan = _policies.make(model, machine, planner)
        except (BudgetError, MachineError) as error:
            way_out = _swap.way_out(session.config, session.device, model.inter_block_bytes)
            raise BudgetError(f"activations {policy!r}: {error}; {way_out}") from error
        return assigned(items, plan["layers"], session, policy)

    def choice(
        self, session: Training, profile: Profile, modes: Assigned, policy: str = ""
    ) -> Made:
        """Make a plan from given modes, which are changed as far as necessary to fit in memory."""
        model, items = describe(profile, self.activations.places, session.layout)
        machine = machine_of(session, profile, model, "")
        model = model.on(_threads(session), machine.adam_params_per_s)
        modes, on_its_way = _fit(session, profile, items, modes, self.at_once)
        outcome = _outcome(session, profile, modes)
        window_bytes = min(on_its_way, session.saving.window_bytes)
        fates = _fates(model, machine, items, modes)
        step = predicted(session, model, machine, fates)
        step_s = step["iteration_s"]
        is_foreseen = False
        if session.device.name != "cpu":
            again_ns = [outcome.again_ns[name] for name in dict.fromkeys(i.block for i in items)]
            with contextlib.suppress(BudgetError):  # keep the timeline's rough prediction
                step_s = foreseen_s(session, model, machine, fates, again_ns, window_bytes)
                is_foreseen = True
        device_bytes = session.device.slot_bytes + _gradient_bytes(session) + outcome.peak_bytes
        plan = Plan(
            policy=policy,
            layers={name: mode for item in items for name, mode in item.said(modes)},
            inputs=dict(modes.inputs),
            step_s=step_s,
            bound_by=step["bound_by"],
            kept_bytes=outcome.kept_bytes,
            swapped_bytes=outcome.left_bytes,
            recompute_s=sum(outcome.again_ns.values()) / NS_PER_S,
            device_bytes=device_bytes
            + (self.at_once - 1) * outcome.kept_bytes
            + min(window_bytes, outcome.left_bytes),
        )
        return Made(plan, self.activations.make(modes), window_bytes, is_foreseen)

    # --- Beside the store ---------------------------------------------------------------------

    def _read(self) -> None:
        profiles = _profile.load(self.path).get(self.key)
        names = {
            place.name: [name for name, _ in module.named_modules(prefix=place.name)]
            for place in self.activations.places
            if (module := place.module()) is not None
        }
        for key, text in profiles.items() if isinstance(profiles, dict) else ():
            profile = Profile.from_json(text)
            if profile is not None and all(
                names.get(visit.block) == visit.names for visit in profile.visits
            ):
                self.shapes.add(key, profile)
                self.has_profile = True

    def _write(self) -> None:
        if not os.path.isdir(os.path.dirname(self.path)):
            return  # the store is temporary
        read = _profile.load(self.path)  # includes the profiles of other models and machines
        read[self.key] = {key: one.as_json() for key, one in self.shapes.profiles().items()}
        _profile.save(self.path, read)


def _fingerprint(session: Training, activations: Activations) -> str:
    """Return a hash of the model and of the hardware and software that it runs on."""
    units = [(u.name, str(u.dtype), u.trainable, u.elements) for u in session.layout.units]
    modules = [
        (name, type(layer).__qualname__, layer.extra_repr())
        for place in activations.places
        for name, layer in (place.module() or nn.Module()).named_modules(prefix=place.name)
    ]
    device = session.device
    where = device.name
    if where == "cuda":
        where = torch.cuda.get_device_name(device.index)
    machine = (torch.__version__, where, os.cpu_count(), torch.get_num_threads())
    return hashlib.sha256(repr((units, modules, machine)).encode()).hexdigest()


def _conservative(session: Training) -> Assigned:
    """Return the conservative plan: recompute all blocks, and offload their inputs if possible."""
    leaves = bool(session.config.swap_bytes)
    return Assigned({}, {}, usual="recompute", usual_input="swap" if leaves else "keep")


# --- The inputs of a plan ---------------------------------------------------------------------


def _outside_bytes(profile: Profile) -> int:
    """Return the bytes that are saved outside of blocks and held while a block's backward runs."""
    return sum(profile.storages[i] for i, before in profile.outside if before < len(profile.visits))


def _room_bytes(session: Training) -> int:
    """Return the bytes of usable memory on the computing device, besides the parameters' slots."""
    device, config = session.device, session.config
    if device.name == "cpu":
        available = int(_core.build_info()["memory_available_bytes"])
        return config.device_bytes or int(_HOST_SHARE * available)
    if device.ceiling_bytes:
        return device.ceiling_bytes - device.slot_bytes
    if device.name == "emu":
        return 1 << 59
    free = torch.cuda.mem_get_info(device.index)[0]
    reserved = torch.cuda.memory_reserved(device.index)
    held = torch.cuda.max_memory_allocated(device.index)
    return max(int(_GPU_SHARE * (free + reserved)) - held, 0)


def _gradient_bytes(session: Training) -> int:
    if session.device.name == "cpu":
        return 0
    return max((unit.gradient_bytes for unit in session.layout.units), default=0)


def _may_leave(session: Training, nbytes: int) -> bool:
    memory, transit, *_ = session.saving.options
    return _offloaded.LEAST_BYTES <= nbytes <= (transit or memory) // 3


def _outcome(session: Training, profile: Profile, modes: Assigned) -> Outcome:
    return replay(profile, modes, lambda nbytes: _may_leave(session, nbytes))


def _without(
    items: list[Item], modes: Assigned, count: int, mode: tuple[str, ...], instead: str
) -> Assigned:
    """Assign the mode `instead` to the first `count` items whose mode is in `mode`.

    Blocks' inputs cannot be recomputed, so they keep their mode if `instead` is "recompute".
    """
    layers, inputs = dict(modes.layers), dict(modes.inputs)
    for item in [item for item in items if item.mode(modes) in mode][:count]:
        if item.names:
            layers.update(dict.fromkeys(item.names, instead))
        elif instead != "recompute":
            inputs[item.block] = instead
    return dataclasses.replace(modes, layers=layers, inputs=inputs)


def _has_places(session: Training, outcome: Outcome, at_once: int) -> bool:
    """Return whether main memory and SSD have room for all storages that are offloaded."""
    memory, transit, store, most = session.saving.options
    staying = memory - transit if session.device.name != "cpu" else 0
    on_ssd = _swap.room_bytes(store)
    for nbytes, is_for_ssd in at_once * outcome.left:
        if not is_for_ssd and nbytes <= staying:
            staying -= -(-nbytes // _core.BLOCK_BYTES) * _core.BLOCK_BYTES
        else:
            on_ssd -= -(-nbytes // _swap.SSD_GRANULE) * _swap.SSD_GRANULE
    return on_ssd >= 0 and at_once * len(outcome.left) <= most


def _fit(
    session: Training, profile: Profile, items: list[Item], planned: Assigned, at_once: int
) -> tuple[Assigned, int]:
    """Change a plan as far as necessary to make it fit in memory, to the byte.

    If main memory and SSD are too small, the first offloaded layers are recomputed instead. Then,
    if device memory is too small, the first kept layers are offloaded, or recomputed if offloading
    is impossible or not enough. If nothing fits, the conservative plan is used.

    Returns:
        The plan, and the device memory that remains for copies in transit, in bytes.
    """
    room = _room_bytes(session) - _gradient_bytes(session)

    def changed(modes: Assigned, mode: tuple[str, ...], instead: str) -> Assigned | None:
        def left(count: int) -> int:
            made = _outcome(session, profile, _without(items, modes, count, mode, instead))
            if not _has_places(session, made, at_once):
                return -1
            if mode == _LEAVES:
                return 0
            before = (at_once - 1) * made.kept_bytes
            return room - before - made.peak_bytes - _ITEMS_ON_THEIR_WAY * made.item_bytes

        low, high = 0, len(items)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if left(middle) >= 0 else (middle + 1, high)
        return _without(items, modes, low, mode, instead) if left(low) >= 0 else None

    placed = changed(planned, _LEAVES, "recompute")
    made = None
    if placed is not None and session.config.swap_bytes:
        made = changed(placed, ("keep",), "swap")
    if placed is not None and made is None:
        made = changed(placed, ("keep",), "recompute")
    made = made or _conservative(session)
    outcome = _outcome(session, profile, made)
    return made, max(room - (at_once - 1) * outcome.kept_bytes - outcome.peak_bytes, 0)


def assigned(items: list[Item], fates: list[str], session: Training, policy: str) -> Assigned:
    """Convert the fates of a plan to a mode for every layer."""
    *_, store, _ = session.saving.options
    modes = dict(_MODES)
    if policy == "g10" and store is not None:
        modes["ssd"] = "ssd"
    if not session.config.swap_bytes:
        modes["host"] = modes["ssd"] = "keep"
    layers: dict[str, str] = {}
    inputs: dict[str, str] = {}
    for item, fate in zip(items, fates, strict=True):
        if item.names:
            layers.update(dict.fromkeys(item.names, modes[fate]))
        else:
            inputs[item.block] = modes[fate]
    return Assigned(layers, inputs)


def _states(session: Training, model: Model) -> list[dict[str, bool]]:
    """Return which states of each block are in main memory and move no bytes between commits."""
    budget, config = session.budget, session.config
    has_p16 = budget["region_bytes"] >= sum(unit.nbytes for unit in session.layout.units)
    kept, count = budget["kept_chunk_count"], max(budget["state_chunk_count"], 1)
    if config.commit_every in ("auto", 1):
        has_p16, kept = False, 0

    def before(block: int) -> int:
        return block * kept // count

    return [
        {
            "is_deferred": config.schedule in SCHEDULES_AT_STEP,
            "has_host_p16": has_p16,
            "has_host_master": before(i + 1) > before(i),
            "has_host_moments": before(i + 1) > before(i),
        }
        for i in range(len(model.blocks))
    ]


def _fates(model: Model, machine: Machine, items: list[Item], modes: Assigned) -> list[str]:
    """Return the items' fates for csrc/plan; offloaded ones go to main memory until it is full."""
    room = machine.host_bytes - buffer_bytes(model)
    fates = []
    for item, layer in zip(items, model.layers, strict=True):
        fate = item.mode(modes)
        if layer.activation_bytes == 0:
            fate = "keep"  # the item has nothing to drop
        if fate == "swap":
            fate = "host" if layer.activation_bytes <= room else "ssd"
            room -= layer.activation_bytes if fate == "host" else 0
        fates.append(fate)
    return fates


def predicted(
    session: Training, model: Model, machine: Machine, fates: list[str]
) -> dict[str, Any]:
    """Predict a step with the timeline of csrc/plan."""
    states = _states(session, model)
    made = _core.plan_step(model.as_core(), machine.as_core(), fates, states, must_fit=False)
    return dict(made["step"])


def _threads(session: Training) -> int:
    """Return the number of threads that update parameters."""
    return session.config.threads or len(os.sched_getaffinity(0))


def machine_of(session: Training, profile: Profile, model: Model, policy: str) -> Machine:
    """Return the machine for csrc/plan, in which one FLOP is one nanosecond of profiled forward.

    `auto` divides main memory between states and activations, so the machine for `auto` includes
    the memory for states.
    """
    memory, transit, *_ = session.saving.options
    write, read = ssd_rates(session.directories, session.stats())
    link_in, link_out = link_rates(session.device)
    resident = memory - transit if session.device.name != "cpu" else 0
    host = session.budget["host_bytes"] if policy == "auto" else 0
    largest = max(block_params(block) for block in model.blocks)
    working = _SLOT_BLOCK_COUNT * model.param_bytes * largest + _ROUNDING_BYTES
    return Machine(
        gpu_flop_per_s=max(3 * model.forward_flop * NS_PER_S // max(profile.compute_ns, 1), 1),
        gpu_bytes=max(_room_bytes(session) - _outside_bytes(profile) + working, 1),
        link_in_bytes_per_s=link_in,
        link_out_bytes_per_s=link_out,
        host_bytes=max(host, buffer_bytes(model)) + resident,
        adam_params_per_s=update_rate(_threads(session), model.rule, model.states),
        ssd_count=len(session.directories),
        ssd_read_bytes_per_s=read,
        ssd_write_bytes_per_s=write,
    )
