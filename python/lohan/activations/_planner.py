"""`activations=` by a policy: a first step is looked at, a plan is made, the next ones go by it.

A forward of a shape that was not seen yet is run by the conservative plan (what blocks are given
leaves where it can, all inside them is computed again) and profiled. The first shape of a run takes
two steps, of which the second one is on warm caches. Profiles lie beside the store.

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
from lohan.activations import _profile_file, _swap
from lohan.activations._foresee import step_s as foreseen_s
from lohan.activations._plan_model import describe
from lohan.activations._profile import Profile, Recorder
from lohan.activations._replay import Assigned, replay
from lohan.config import SCHEDULES_AT_STEP
from lohan.errors import BudgetError, MachineError
from lohan.planning import _policies
from lohan.planning._measure import link_rates, ssd_rates, update_rate
from lohan.planning._pieces import block_params, buffer_bytes
from lohan.planning._plan import Machine
from lohan.torch_glue._tensor import SavedTensors, in_backward, in_transform

if TYPE_CHECKING:
    from lohan.activations._activations import Activations, Block
    from lohan.activations._plan_model import Item
    from lohan.activations._replay import Outcome
    from lohan.planning._plan import Model
    from lohan.session._session import Session

FILE_NAME = "profile.json"
_ROUNDS_FIRST = 2
# Plans, and profiles in the file; forwards that are looked at though no step ends; forwards whose
# activations are there at once, as far as plans reckon with them.
_SHAPE_COUNT_MAX = 64
_FORWARD_COUNT_MAX = 256
_AT_ONCE_MAX = 8
NS_PER_S = 1_000_000_000
# Of main memory that is available, for activations that stay where computation is there, too.
_HOST_SHARE = 0.8
_GPU_SHARE = 0.9
_MODES = {"keep": "keep", "host": "swap", "ssd": "swap", "recompute": "recompute"}
_LEAVES = ("swap", "ssd")
# What the core counts as working memory of the GPU besides, and lohan has in slots of their own.
_SLOT_BLOCK_COUNT = 2
_ROUNDING_BYTES = 2 << 20
# Activations on their way need room on the device for so many at least.
_ITEMS_ON_THEIR_WAY = 2
# Whose plans `auto` has to choose from; /moved: nothing stays on the device that can leave.
_AUTO_TRIES = ("auto", "auto/moved", "lohan", "capuchin", "zero")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is done with activations of forwards of one shape, and what that should cost.

    Attributes:
        policy: that made it.
        layers: "keep", "swap", "ssd" or "recompute", by layers' names.
        inputs: the same of what blocks are given, by blocks' names.
        step_s: how long a step is predicted to take, in seconds.
        bound_by: the resource that is predicted to be busiest.
        kept_bytes: of activations that stay where computation happens.
        swapped_bytes: of those that leave.
        recompute_s: of computing again, in seconds.
        device_bytes: the most that parameters' slots, activations that stay, those of a block that
            is computed again, gradients and activations on their way take together.
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
        """A line for people."""
        modes = collections.Counter(self.layers.values())
        layers = ", ".join(f"{count} {mode}" for mode, count in modes.most_common())
        return (
            f"activations {self.policy!r}: {self.step_s:.3g} s a step foreseen, bound by"
            f" {self.bound_by}; layers: {layers}; {self.kept_bytes / 1e6:.1f} MB stay,"
            f" {self.swapped_bytes / 1e6:.1f} MB leave, {self.recompute_s:.2g} s of computing again"
        )


@dataclasses.dataclass(frozen=True)
class Made:
    """A plan, and what carries it out.

    Attributes:
        plan: for people.
        blocks: to be put on the model.
        window_bytes: of activations that may be on their way at once.
        is_foreseen: its step by the engine in virtual time, not by the timeline.
    """

    plan: Plan
    blocks: list[Block]
    window_bytes: int
    is_foreseen: bool = False


@dataclasses.dataclass
class _Shape:
    """Forwards whose tensors have one shape."""

    rounds: int
    profile: Profile | None = None
    made: Made | None = None
    flop: list[list[int]] = dataclasses.field(default_factory=list)  # of the first round's visits
    held_up: Profile | None = None  # the first, if another one is to tell
    is_read: bool = False  # from the file: a cache, which may be wrong


@dataclasses.dataclass
class _Step:
    """The open step, as far as it is looked at."""

    recorder: Recorder | None = None
    forwards: int = 0
    shapes: set[int] = dataclasses.field(default_factory=set)


class Planner:
    """A session's, whose `activations` is a policy.

    Args:
        session: whose hooks are being put on.
        activations: its blocks.
    """

    def __init__(self, session: Session, activations: Activations) -> None:
        self.session = weakref.ref(session)
        self.activations = activations
        self.policy = str(session.config.activations)
        self.shapes: dict[str, _Shape] = {}
        self.shape: _Shape | None = None  # of the last forward
        self.step = _Step()
        self.waiting = 0  # forwards whose backward has not come
        self.at_once = 1  # of these, at most
        self.has_profile = False
        self.path = os.path.join(session.directories[0], FILE_NAME)
        self.key = _fingerprint(session, activations)
        self.conservative = activations.make(_conservative(session))
        activations.put(self.conservative)
        if session.config.profile == "reuse":
            self._read()

    # --- The step -----------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward of the model is about to begin."""
        session = self.session()
        if session is None or in_backward() or not torch.is_grad_enabled():
            return
        if session._forward_is_alive():
            return
        session.refuse_other_thread("the model")
        if in_transform():  # what it saves cannot leave, nor be computed again
            session.around = session.saving.stay
            self.step.shapes.add(0)  # nor be told apart from the rest of the step
            return
        shape = self._shape_of(module, args, kwargs)
        self.shape = shape
        self.step.shapes.add(id(shape))
        if module.training:
            self.waiting = min(self.waiting + 1, _AT_ONCE_MAX)
            if self.waiting > self.at_once:  # their activations are there at once
                self.at_once = self.waiting
                for other in self.shapes.values():
                    other.made = None
        if shape.profile is not None and shape.made is None:
            shape.made = self._choose(session, shape, shape.profile)
        if shape.made is not None:
            self._use(session, shape.made)
        else:
            self._record(session)

    def _shape_of(self, module: nn.Module, args: Any, kwargs: Any) -> _Shape:
        key = _profile_file.key_of(module, args, kwargs)
        shape = self.shapes.pop(key, None)
        if shape is None:
            shape = _Shape(1 if self.has_profile else _ROUNDS_FIRST)
        self.shapes[key] = shape  # the last one in use is the last to go
        if len(self.shapes) > _SHAPE_COUNT_MAX:
            del self.shapes[next(iter(self.shapes))]
        return shape

    def _choose(self, session: Session, shape: _Shape, profile: Profile) -> Made | None:
        """What the policy does; None: the profile is a file's that does not fit, look again."""
        try:
            return self.choose(session, profile, self.policy)
        except Exception:
            if not shape.is_read:
                raise
            shape.profile, shape.is_read, shape.rounds = None, False, 1
            return None

    def _use(self, session: Session, made: Made) -> None:
        session.around = session.saving.stay
        session.saving.window_set(made.window_bytes)
        if self.activations.blocks is not made.blocks:
            self.activations.put(made.blocks)

    def _record(self, session: Session) -> None:
        step, stay = self.step, session.saving.stay
        if step.forwards >= _FORWARD_COUNT_MAX:  # nobody takes steps
            step = self.step = _Step()
        if step.recorder is None:
            step.recorder = Recorder(session.device.torch_device, has_flops=not self.has_profile)
            session.saving.wait_take_ns()  # of the steps before
        recorder = step.recorder
        recorder.begin_forward()
        step.forwards += 1

        def pack(tensor: torch.Tensor) -> Any:
            packed = stay.pack(tensor)
            if not isinstance(packed, _core.Handle):
                recorder.save_outside(tensor)
            return packed

        session.around = SavedTensors(pack, stay.unpack)
        session.saving.window_set(None)
        self.activations.put(self.activations.make(_conservative(session), recorder.frame))

    def backward_end(self) -> None:
        """What forwards saved is gone, as a rule."""
        self.waiting = 0

    def forget(self) -> None:
        """The open step is forgotten: what it showed is no step's."""
        self.step, self.waiting = _Step(), 0

    def step_end(self, session: Session) -> None:
        """A step is closed: if it was profiled, take what it took."""
        step, self.step, self.waiting = self.step, _Step(), 0
        recorder, shape = step.recorder, self.shape
        if recorder is None or shape is None or len(step.shapes) > 1:
            return  # accumulated batches of several shapes are not told apart
        session.flush()
        stats = session.stats()
        visits = recorder.finish()
        if stats.step == 0 or not visits:
            return
        waits = session.saving.wait_take_ns() + stats.param_wait_ns + stats.gradient_wait_ns
        compute_ns = (stats.wall_ns - waits - recorder.again_ns) // step.forwards
        if session.device.name == "cuda":  # what its stream waits for, nobody here sees
            compute_ns = 3 * sum(ns for visit in visits for ns in visit.ns)
        if compute_ns <= 0:
            return  # it mostly waited: the next step is looked at instead
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
        shape.is_read = False
        self._write()

    # --- The plan -----------------------------------------------------------------------------

    def choose(self, session: Session, profile: Profile, policy: str) -> Made:
        """What a policy does with forwards like the one that was profiled.

        By `auto` the fastest of several plans, as the engine in virtual time has them: it sees more
        than the timeline that they were made by.

        Raises:
            BudgetError: it cannot; `auto` can what the first steps could.
        """
        if policy != "auto":
            modes = self._planned(session, profile, policy, policy)
            return self.choice(session, profile, modes, policy)
        tried: list[Assigned] = []
        # Without an accelerator there is no virtual time.
        for planner in _AUTO_TRIES[: 1 if session.device.name == "cpu" else None]:
            with contextlib.suppress(BudgetError):
                modes = self._planned(session, profile, policy, planner)
                tried += [modes] if modes not in tried else []
        tried = tried or [_conservative(session)]
        made = [self.choice(session, profile, modes, policy) for modes in tried]
        return min(made, key=lambda one: (not one.is_foreseen, one.plan.step_s))

    def _planned(self, session: Session, profile: Profile, policy: str, planner: str) -> Assigned:
        """What a planner says, with the memory that a policy may use."""
        model, items = describe(profile, self.activations.places, session.layout)
        machine = machine_of(session, profile, model, planner.partition("/")[0])
        try:
            plan = _policies.make(model, machine, planner)
        except (BudgetError, MachineError) as error:
            way_out = _swap.way_out(session.config, session.device, model.inter_block_bytes)
            raise BudgetError(f"activations {policy!r}: {error}; {way_out}") from error
        return assigned(items, plan["layers"], session, policy)

    def choice(self, session: Session, profile: Profile, modes: Assigned, policy: str = "") -> Made:
        """The same for given modes, changed as far as that makes them fit."""
        model, items = describe(profile, self.activations.places, session.layout)
        machine = machine_of(session, profile, model, "")
        modes, on_its_way = _fit(session, profile, items, modes, self.at_once)
        outcome = _outcome(session, profile, modes)
        window_bytes = min(on_its_way, session.saving.window_bytes)
        fates = _fates(model, machine, items, modes)
        step = predicted(session, model, machine, fates)
        step_s = step["iteration_s"]
        is_foreseen = False
        if session.device.name != "cpu":
            again_ns = [outcome.again_ns[name] for name in dict.fromkeys(i.block for i in items)]
            with contextlib.suppress(BudgetError):  # the timeline says it roughly
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
        profiles = _profile_file.load(self.path).get(self.key)
        names = {
            place.name: [name for name, _ in module.named_modules(prefix=place.name)]
            for place in self.activations.places
            if (module := place.module()) is not None
        }
        for key, text in profiles.items() if isinstance(profiles, dict) else ():
            profile = Profile.from_json(text)
            if profile is None or len(self.shapes) >= _SHAPE_COUNT_MAX:
                continue
            if all(names.get(visit.block) == visit.names for visit in profile.visits):
                self.shapes[key] = _Shape(0, profile, is_read=True)
                self.has_profile = True

    def _write(self) -> None:
        if not os.path.isdir(os.path.dirname(self.path)):
            return  # a temporary store
        read = _profile_file.load(self.path)  # of other machines, too
        profiles = {k: s.profile.as_json() for k, s in self.shapes.items() if s.profile is not None}
        read[self.key] = profiles
        _profile_file.save(self.path, read)


def _fingerprint(session: Session, activations: Activations) -> str:
    """Of the model, and of what it runs on."""
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


def _conservative(session: Session) -> Assigned:
    """All inside blocks is computed again; what they are given leaves where it can."""
    leaves = bool(session.config.swap_bytes)
    return Assigned({}, {}, usual="recompute", usual_input="swap" if leaves else "keep")


# --- What a plan is made from -----------------------------------------------------------------


def _outside_bytes(profile: Profile) -> int:
    """What is saved outside of blocks and is there while their backward runs."""
    return sum(profile.storages[i] for i, before in profile.outside if before < len(profile.visits))


def _room_bytes(session: Session) -> int:
    """Where computation happens, besides parameters."""
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


def _gradient_bytes(session: Session) -> int:
    if session.device.name == "cpu":
        return 0
    return max((unit.gradient_bytes for unit in session.layout.units), default=0)


def _may_leave(session: Session, nbytes: int) -> bool:
    memory, transit, *_ = session.saving.options
    return _swap.LEAST_BYTES <= nbytes <= (transit or memory) // 3


def _outcome(session: Session, profile: Profile, modes: Assigned) -> Outcome:
    return replay(profile, modes, lambda nbytes: _may_leave(session, nbytes))


def _without(
    items: list[Item], modes: Assigned, count: int, mode: tuple[str, ...], instead: str
) -> Assigned:
    """Of the layers with one of these modes the first ones have another."""
    layers, inputs = dict(modes.layers), dict(modes.inputs)
    for item in [item for item in items if item.mode(modes) in mode][:count]:
        if item.names:
            layers.update(dict.fromkeys(item.names, instead))
        elif instead != "recompute":
            inputs[item.block] = instead
    return dataclasses.replace(modes, layers=layers, inputs=inputs)


def _has_places(session: Session, outcome: Outcome, at_once: int) -> bool:
    """Main memory and SSD have room for all that leaves, each where it goes."""
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
    session: Session, profile: Profile, items: list[Item], planned: Assigned, at_once: int
) -> tuple[Assigned, int]:
    """The plan, with as much of it changed as makes all fit, to the byte.

    What does not find room where it goes is computed again, from the first layers on; then, while
    the device is too full, what stays there leaves, or is computed again.

    Returns:
        It, and what is left of the device for copies on their way, in bytes.
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


def assigned(items: list[Item], fates: list[str], session: Session, policy: str) -> Assigned:
    """A mode for every layer, from the plan's."""
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


def _states(session: Session, model: Model) -> list[dict[str, bool]]:
    """Where each block's states are: between commits, what main memory keeps moves no bytes."""
    budget, config = session.budget, session.config
    has_p16 = budget["region_bytes"] >= sum(unit.nbytes for unit in session.layout.units)
    kept, count = budget["kept_chunk_count"], max(budget["chunk_count"], 1)
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
    """As csrc/plan says it: what leaves goes to main memory first, as far as there is room."""
    room = machine.host_bytes - buffer_bytes(model)
    fates = []
    for item, layer in zip(items, model.layers, strict=True):
        fate = item.mode(modes)
        if layer.activation_bytes == 0:
            fate = "keep"  # nothing of it is dropped, so it is not computed again
        if fate == "swap":
            fate = "host" if layer.activation_bytes <= room else "ssd"
            room -= layer.activation_bytes if fate == "host" else 0
        fates.append(fate)
    return fates


def predicted(session: Session, model: Model, machine: Machine, fates: list[str]) -> dict[str, Any]:
    """A step by the timeline."""
    states = _states(session, model)
    made = _core.plan_step(model.as_core(), machine.as_core(), fates, states, must_fit=False)
    return dict(made["step"])


def machine_of(session: Session, profile: Profile, model: Model, policy: str) -> Machine:
    """The machine as csrc/plan sees it; a FLOP is what computes in a nanosecond by the profile.

    `auto` shares out main memory between states and activations: it sees that for states, too.
    """
    memory, transit, *_ = session.saving.options
    write, read = ssd_rates(session.directories, session.stats())
    link_in, link_out = link_rates(session.device)
    resident = memory - transit if session.device.name != "cpu" else 0
    host = session.budget["host_bytes"] if policy == "auto" else 0
    workers = session.config.threads or len(os.sched_getaffinity(0))
    largest = max(block_params(block) for block in model.blocks)
    working = _SLOT_BLOCK_COUNT * model.param_bytes * largest + _ROUNDING_BYTES
    return Machine(
        gpu_flop_per_s=max(3 * model.forward_flop * NS_PER_S // max(profile.compute_ns, 1), 1),
        gpu_bytes=max(_room_bytes(session) - _outside_bytes(profile) + working, 1),
        link_in_bytes_per_s=link_in,
        link_out_bytes_per_s=link_out,
        host_bytes=max(host, buffer_bytes(model)) + resident,
        adam_params_per_s=update_rate(workers),
        ssd_count=len(session.directories),
        ssd_read_bytes_per_s=read,
        ssd_write_bytes_per_s=write,
    )
