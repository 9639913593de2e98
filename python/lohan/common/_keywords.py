"""The settings as users write them: keywords of `lohan.wrap`, and groups of those that few need.

[Note: Names of settings] lohan.config declares each setting once, in one flat dataclass, with the
name that users write as `public`. The groups here are a face in front of it: they take their
defaults from it, and flat() translates what a call was given into its names. Former names are
translated by the same function, with a warning, for one release.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import sys
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from lohan.common import _arguments, _setting
from lohan.config import Config, Schedule
from lohan.errors import ModelError

if TYPE_CHECKING:
    import torch

G = TypeVar("G")

Size = int | str
_DECLARED = _setting.declared(Config)
_PLAIN = Config()
_FLAT = "flat"
# Keywords of wrap() that have a new name but are not fields of Config, and the new name.
_OTHERS = {
    "states": "moments",
    "groups": "parallel.groups",
    **{name: f"method.{name}" for name in ("num_samples", "rng", "seed", "storage")},
}
# The names of the same settings in other libraries.
_ELSEWHERE = {
    "learning_rate": "lr",
    "gradient_clipping": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "max_norm": "max_grad_norm",
    "nvme_path": "store",
    "offload_folder": "store",
    "gradient_checkpointing": "activations",
}
_NEAR = 0.6
_HERE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


def _fields(group: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(group)


def _of(name: str) -> Any:
    """Return the field of a group for a setting of Config or of wrap(), with the same default."""
    default = getattr(_PLAIN, name, None)
    said = _DECLARED.get(name)
    if said is not None and said.flag is not None:
        default = default == said.flag[True]
    return dataclasses.field(default=default, metadata={_FLAT: name})


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def _group(cls: type[G]) -> type[G]:
    """Make a frozen dataclass whose constructor suggests the right name for a wrong one."""
    made = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    plain: Any = made.__init__
    fields = [field.name for field in _fields(made)]

    @functools.wraps(plain)
    def checked(self: Any, **given: Any) -> None:
        for name in given.keys() - set(fields):
            near = difflib.get_close_matches(name, fields, n=1, cutoff=_NEAR)
            meant = f"{near[0]}=" if near else _meant(name, ())
            way_out = f"did you mean {meant}?" if meant else f"its fields are {', '.join(fields)}"
            raise ModelError(f"{name}= is not a field of lohan.{cls.__name__}: {way_out}")
        plain(self, **given)

    made.__init__ = checked  # type: ignore[method-assign]
    return made


@_group
class IO:
    """Settings of files and of requests to drives: `lohan.wrap(model, io=lohan.IO(depth=32))`.

    Attributes:
        backend: "auto" (the best one that works here), "io_uring", "libaio" or "threads".
        depth: I/O requests in flight. On the virtual disk that was measured, 16 requests of 4 MiB
            moved 2 to 4 % (reads) and 4 to 7 % (writes) more than 8, and 32 little more than 16;
            each doubling doubles the queue that a demand read waits for.
        transfer_bytes: the largest I/O request, in bytes; a multiple of 1 MiB.
        single_slot: the store has one slot for each block instead of two, which halves its space on
            SSD; no step is committed, so nothing can be resumed after a crash
            (docs/checkpoints.md). Not where processes of a machine have share=True.

            The name is that of the layout, which the store keeps for good; that steps are not
            committed only follows from it.
        verify: verify the checksums of everything that is read.
        clip: what max_grad_norm means for updates; the numbers are the same. "wait": they wait for
            the norm of all gradients, and run after `step()`. "repeat": they run as gradients
            arrive, as if the norm were small; a step whose norm is too large is undone and made
            again, with the factor. The step after one that was clipped waits. Gradients stay until
            `step()`, in main memory or on SSD. Where this is not possible, updates wait, and a line
            says why: with another schedule than "optimized", accumulation, loss_scaling, several
            processes, commit_every other than "auto" and 1 (every step then commits),
            experts="apart", or a rule with sums, factors or matrices.
        frozen: how to store parameters that require no gradient, for a model with weights=.
            "in_place": they are read from those files whenever they are needed, and are not in the
            store. "packed": the same, and the memory of host_bytes that training does not need
            keeps quantized parameters in their packed bytes, which are then not read again.
            "copy": they are copied into the store (if the files are on a slower disk or will be
            removed).
        activation_ssd_bytes: space on SSD for offloaded activations, allocated at the start; each
            tensor takes a multiple of 1 MiB. None: half of the free space, for a policy at most
            sixteen times activation_offload_bytes. 0: none, so they stay in main memory.
        wear_budget: the bytes that the run may write to the drives of its store, counted over all
            sessions that resume it: "50TB", or "1TB/day" for each day (UTC). Training stops with
            lohan.WearBudgetError at the last step that does not exceed it. With several processes,
            each counts what it writes. None: no limit.
        ssd_endurance_bytes: the bytes that may be written to one drive in its life (TBW), such as
            "600TB", to compare with what steps write. None: as the drive reports, if it does.
        allow_buffered: continue without O_DIRECT if the file system does not support it.
        allow_tmpfs: allow a store in main memory (for tests).
    """

    backend: Literal["auto", "io_uring", "libaio", "threads"] = _of("io")
    depth: int = _of("io_depth")
    transfer_bytes: Size = _of("transfer_bytes")
    single_slot: bool = dataclasses.field(default=False)
    verify: bool = _of("verify")
    clip: Literal["wait", "repeat"] = _of("clip")
    frozen: Literal["in_place", "packed", "copy"] = _of("frozen")
    activation_ssd_bytes: Size | None = _of("swap_ssd_bytes")
    wear_budget: Size | None = _of("wear_budget")
    ssd_endurance_bytes: Size | None = _of("ssd_endurance_bytes")
    allow_buffered: bool = _of("allow_buffered")
    allow_tmpfs: bool = _of("allow_tmpfs")


@_group
class Parallel:
    """Settings of several processes: `lohan.wrap(model, parallel=lohan.Parallel(share=True))`.

    Attributes:
        share: with several processes on a machine and AdamW. False: each has a store, parameters
            and states of its own. True: the process with the lowest rank on a machine has them for
            all processes of the machine, which read its parameters in its memory; host_bytes is
            then the machine's (docs/several-processes.md).
        shard_optimizer: with several processes and AdamW. False: each process has all parameters
            and all states of the optimizer. True: each process has all parameters, but the states
            of its share of them only; it updates these, and sends the new values to the others.
            With share=True, each machine has a share. Updates run in `step()`
            (docs/several-processes.md).
        sum_order: the order in which the gradients of a step are added, in fp32. "sequential": one
            micro-batch after the other. "tree": in pairs, pairs of pairs and so on, so that each
            process adds up its own micro-batches and sends the sums instead of the gradients; the
            result does not depend on the number of processes. A store has one order for good. None:
            that of the store; for a new one "sequential" (docs/several-processes.md).
        gather: with share=True and an accelerator for each process, how blocks are copied to the
            accelerators. "host": each process copies whole blocks from main memory. "shards": each
            copies a part of the block over its own link to main memory, and gets the other parts
            from the other accelerators. "auto": the processes of each machine measure both ways
            when they wrap, and use the faster one (docs/several-processes.md).
        groups: process groups of modules that some processes lack (docs/several-processes.md).
        timeout_s: how long another process may be silent before it counts as lost, in seconds. On
            the same machine a process that ends is noticed at once. wrap() waits ten times as long
            for the others to come, and at least 600 seconds.
    """

    share: bool = _of("share")
    shard_optimizer: bool = _of("replicas")
    sum_order: Literal["sequential", "tree"] | None = _of("sum_order")
    gather: Literal["host", "shards", "auto"] = _of("gather")
    groups: Mapping[str, Any] | None = _of("groups")
    timeout_s: float = _of("peer_timeout_s")


@_group
class Debug:
    """Settings to look into a run, to emulate a device, and to replace what lohan chooses itself.

    `lohan.wrap(model, debug=lohan.Debug(trace_events=100_000))`; no run needs them.

    Attributes:
        trace_events: the number of timeline events to keep; 0: none.
        step_records: keep figures of each step in a file beside the store, for `lohan watch`.
        profile: the measurements of a policy's first steps are stored beside the store. "reuse":
            the next run with the same model, shape and machine starts from them. "again": it
            measures again.
        threads: worker threads of the CPU optimizer. None: one per core that this process may use;
            with device="cuda" three fewer, but at least half of the cores.
        nice: increment of the workers' nice value, so that the training thread has priority when
            both compete for a core. None: 5 with device="cuda", otherwise 0.
        heap: "keep": if torch computes on the CPU, the C library's heap keeps the memory that torch
            frees, for the whole process and until its end, so that each step reuses pages that are
            already mapped (15 % faster where measured, with a 25 % higher memory peak). "system":
            the heap is left unchanged.
        device_param_bytes: the part of device_bytes for parameters. None: half of it (a quarter of
            a GPU's free memory), at least what is in use at the same time. An integrated GPU reads
            parameters in main memory, and this setting lets it get copies instead.
        emu_bytes_per_s: the speed of the emulated device's two links, in and out. None: the speed
            of a memory copy.
        emu_alloc_bytes_per_s: the speed at which the emulated device allocates memory, while it
            stands still; used only with ablate=("reuse",). None: allocation takes no time.
        ablate: with method="mezo", parts of ZO2's schedule to disable, to measure their effect:
            "overlap" (copies to the device begin only when they are waited for), "reuse" (device
            memory is freed after each block and allocated for the next; emu only), "deferred" (each
            block is loaded once more for its update).
    """

    trace_events: int = _of("trace_events")
    step_records: bool = _of("step_records")
    profile: Literal["reuse", "again"] = _of("profile")
    threads: int | None = _of("threads")
    nice: int | None = _of("nice")
    heap: Literal["keep", "system"] = _of("heap")
    device_param_bytes: Size | None = _of("device_param_bytes")
    emu_bytes_per_s: tuple[Size, Size] | None = _of("emu_bytes_per_s")
    emu_alloc_bytes_per_s: Size | None = _of("emu_alloc_bytes_per_s")
    ablate: tuple[str, ...] = _of("ablate")


@_group
class MeZO:
    """Zeroth-order training: `lohan.wrap(model, method=lohan.MeZO(num_samples=2))`.

    method="mezo" is the same as method=lohan.MeZO(). See docs/zeroth-order.md.

    Attributes:
        num_samples: directions per step, whose estimates are averaged. None: 1.
        seed: the seed of all directions. None: torch's initial seed.
        rng: "philox" or "torch" (z as MeZO's own code draws it). None: "philox".
        storage: the format of parameters between steps: "fp32", "bf16", "fp16" or "fp8". None: the
            parameters' own.
        write_every: steps between writes of the parameters to the store; the journal holds the
            steps in between. "never": parameters are not written, only the journal grows. "auto":
            never if all parameters fit in memory, otherwise an interval chosen from the measured
            rates of the SSDs and of the generator.
        runs: how the two runs of the model in a step are executed. "together": they alternate block
            by block, each on its own thread, so that a block is read once for both. "apart": one
            after the other. "auto": together unless all parameters fit in memory.
    """

    num_samples: int | None = _of("num_samples")
    seed: int | None = _of("seed")
    rng: Literal["philox", "torch"] | None = _of("rng")
    storage: Literal["fp32", "bf16", "fp16", "fp8"] | None = _of("storage")
    write_every: int | Literal["auto", "never"] = _of("write_every")
    runs: Literal["auto", "together", "apart"] = _of("runs")


@_group
class SGD:
    """Stochastic gradient descent: `lohan.wrap(model, method=lohan.SGD(momentum=0.9), lr=0.1)`.

    method="sgd" is the same as method=lohan.SGD(). See docs/update-rules.md.

    Attributes:
        momentum: the factor of the last steps' gradients. None: 0, and there are no states.
        dampening: with a momentum, 1 minus the factor of the gradient. None: 0.
        nesterov: with a momentum, whether it is Nesterov's. None: False.
    """

    momentum: float | None = _of("momentum")
    dampening: float | None = _of("dampening")
    nesterov: bool | None = _of("nesterov")


@_group
class Adagrad:
    """Adagrad: `lohan.wrap(model, method=lohan.Adagrad(lr_decay=1e-3), lr=0.01)`.

    method="adagrad" is the same as method=lohan.Adagrad(). See docs/update-rules.md.

    Attributes:
        lr_decay: step t has the learning rate lr / (1 + (t - 1) lr_decay). None: 0.
        initial_accumulator_value: with what each sum of squares begins. None: 0.
    """

    lr_decay: float | None = _of("lr_decay")
    initial_accumulator_value: float | None = _of("initial_accumulator_value")


@_group
class RMSprop:
    """RMSprop, not centered: `lohan.wrap(model, method=lohan.RMSprop(alpha=0.9), lr=1e-3)`.

    method="rmsprop" is the same as method=lohan.RMSprop(). See docs/update-rules.md.

    Attributes:
        alpha: the factor of the average of squares in a step. None: 0.99.
        momentum: the factor of the last steps' updates. None: 0, and there is one state fewer.
    """

    alpha: float | None = _of("alpha")
    momentum: float | None = _of("momentum")


@_group
class Adafactor:
    """Adafactor, as torch.optim has it: `lohan.wrap(model, method=lohan.Adafactor(), lr=0.01)`.

    method="adafactor" is the same as method=lohan.Adafactor(). See docs/update-rules.md.

    Attributes:
        beta2_decay: in step t a gradient's squares have the part t^beta2_decay of the second
            moments. None: -0.8.
    """

    beta2_decay: float | None = _of("beta2_decay")


@_group
class Muon:
    """Muon: `lohan.wrap(model, method=lohan.Muon(adjust_lr_fn="match_rms_adamw"), lr=2e-4)`.

    method="muon" is the same as method=lohan.Muon(). Matrices of hidden layers are updated by Muon,
    the other parameters by AdamW. See docs/update-rules.md.

    Attributes:
        momentum: the factor of the last steps' gradients. None: 0.95.
        nesterov: whether the momentum is Nesterov's. None: True.
        adjust_lr_fn: what the shape (A, B) of a matrix makes of the learning rate: "original", or
            None, multiplies it by sqrt(max(1, A / B)), "match_rms_adamw" by 0.2 sqrt(max(A, B)).
    """

    momentum: float | None = _of("momentum")
    nesterov: bool | None = _of("nesterov")
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = _of("adjust_lr_fn")


class Settings(TypedDict, total=False):
    """The keywords of `lohan.wrap` that do not change the numbers, with their types.

    None of them changes the numbers that training computes, except `on_nan` if gradients are not
    finite. Sizes in bytes may also be strings: "16GB" (units of 1000^3 bytes), "16GiB" (1024^3),
    "500MB".

    Attributes:
        host_bytes: main memory for parameters, optimizer states and gradients in transit, in bytes.
            None: half of the available memory, at most what the model can use.
        device: where computation happens: "cpu" (main memory), "cuda", "cuda:1", or "emu", an
            accelerator emulated in main memory (to test without a GPU). A torch.device is accepted,
            too. None: the CPU, even if torch sees a GPU (for a Trainer's callback: the Trainer's
            device).
        device_bytes: limit on the device memory for parameters, kept saved tensors and outgoing
            gradients together. None: the device's memory. If the model computes in main memory: the
            saved tensors that a policy may keep there (None: most of the available memory).
        gradient_accumulation_steps: the number of backwards per step. Their gradients are summed in
            fp32, as in p.grad (divide the loss by this number to get the mean), using 4 bytes of
            main memory per trainable parameter. `step()` may come earlier and uses the gradients up
            to then. "manual": a step sums the backwards in `with model.no_sync():` and the one
            after them. Updates wait for `step()`: schedule "serial" is kept, any other becomes
            "deferred".
        order: the order of accumulated micro-batches in `model.lohan.accumulate()`. "horizontal":
            one after the other. "vertical": each block runs all of them before the next block does,
            so the parameters are read once for all; the inputs of the blocks of all micro-batches
            are kept until backward, as are the activations unless `activations` says otherwise.
            "auto": "vertical" if parameters do not stay in memory and what the micro-batches keep
            fits there together, which the first call of accumulate() measures. The numbers are the
            same.
        activations: what autograd keeps of a block's forward. "keep": everything that operations
            save. "recompute": only the block's inputs; the rest is recomputed in backward (one more
            forward per step, with torch's generators, autocast and buffers restored to their state
            in the first forward).
            A dict maps patterns (as in fnmatch) of layer names to "keep" (activations stay where
            they were computed), "recompute" or "swap" (they are offloaded, see
            activation_offload_bytes). A layer is a module inside a block, or the block itself. The
            first pattern that matches the name of the layer or of an enclosing module applies;
            without a match, activations are kept. It applies to everything the layer computes,
            including its output. Layers that are kept or swapped with everything inside them are
            skipped when their block is recomputed.
            {"*.attn": "keep", "*": "recompute"} recomputes everything except attention.
            The name of a policy ("auto", or "lohan" or "fuyou", those of the papers; see
            docs/planning.md): two steps are profiled with everything recomputed, then the policy
            decides what is kept, offloaded or recomputed (`model.lohan.plan()`). The first step of
            each further batch shape is profiled as well. Without activation_offload_bytes, a policy
            may use a quarter of host_bytes, at most eight times the size of the parameters.
            With any value but "keep", a transformers model in training mode does not build a cache
            of keys and values unless the caller passes use_cache=True.
        activation_offload_bytes: main memory (part of host_bytes) for offloaded activations: saved
            tensors of 64 KiB and more are copied there while forward continues, and are back when
            backward needs them. Activations of an accelerator stay in main memory while there is
            room, and go to SSD otherwise; if the model computes in main memory, all of them go to
            SSD. None: nothing is offloaded, except by a policy. 0: nothing is offloaded.
        commit_every: steps between commits, or "auto" (every step; but where main memory keeps much
            of what a commit writes, so rarely that commits take at most half a percent of the time,
            and within two years at most the drives' endurance), or "manual" (only
            `model.lohan.commit()` commits, closing does not: the store then always matches the
            checkpoint that was saved with it). State that stays in main memory is not written
            between commits: optimizer states of chunks that stay there, and the parameters if all
            of them do. A flush writes it.
        schedule: when updates run; the numbers are the same. "optimized": as gradients arrive, with
            reads, arithmetic and writes overlapped (LoHan IV-C). "naive": as gradients arrive, but
            each block is read, then computed, then written. "deferred": each just before its
            block's next forward. "serial": in `step()`, which waits for them. "auto": like
            "optimized", but after the first steps some blocks are "deferred" if that is found to be
            faster (it is when backward alone does not hide the updates and memory has room for the
            waiting gradients).
        on_nan: what a step does whose gradients are not finite (NaN or infinity). "raise": the
            session ends with a NonFiniteError that names the parameter and the step, which is not
            committed: training can be resumed from the last commit. If the norm of all gradients is
            computed (max_grad_norm, loss_scaling), the error comes in `step()` before any update,
            so that zero_grad() discards the step, and training can continue. "skip": `step()`
            discards the step and prints a line; this needs the norm, and so a schedule whose
            updates wait for `step()`. "accept": as in torch, the parameter becomes NaN.
        ema: the decay of an exponential moving average of the trained parameters, such as 0.999;
            None disables it. Each step computes average = decay * average + (1 - decay) * parameter
            in fp32, with the bits of torch.optim.swa_utils.AveragedModel; the first step begins the
            averages as copies. They are in the store, 4 bytes an element, which each step reads and
            writes as well. lohan.ema(model) evaluates them.
        loss_scaling: True if torch.amp.GradScaler scales the loss. Updates then wait for `step()`,
            as with gradient_accumulation_steps, and for the norm that shows whether a gradient
            overflowed.
        io: settings of files and of requests to drives.
        parallel: settings of several processes.
        debug: settings to look into a run, and to replace what lohan chooses itself.
    """

    host_bytes: Size | None
    device: str | torch.device | None
    device_bytes: Size | None
    gradient_accumulation_steps: int | Literal["manual"]
    order: Literal["horizontal", "vertical", "auto"]
    activations: str | Mapping[str, str]
    activation_offload_bytes: Size | None
    commit_every: int | Literal["auto", "manual"]
    schedule: Schedule
    on_nan: Literal["raise", "skip", "accept"]
    ema: float | None
    loss_scaling: bool
    io: IO
    parallel: Parallel
    debug: Debug


class OfCallback(Settings, total=False):
    """The keywords of `lohan.TrainerCallback`: settings, and what no Trainer has."""

    weights: str | os.PathLike[str] | None
    init: str | Callable[[Any], None] | None
    blocks: Sequence[Any] | None
    moments: Literal["fp32", "bf16", "8bit", "4bit"]
    experts: Literal["together", "apart"]
    idle: Literal["exact", "skip"]
    method: str | MeZO | SGD | Adagrad | RMSprop | Adafactor | Muon
    eps: float | tuple[float | None, float]


GROUPS: dict[str, type] = {"io": IO, "parallel": Parallel, "debug": Debug, "method": MeZO}
# What else method= may be, with the method's name.
_METHODS: dict[type, str] = {
    MeZO: "mezo",
    SGD: "sgd",
    Adagrad: "adagrad",
    RMSprop: "rmsprop",
    Adafactor: "adafactor",
    Muon: "muon",
}
_ALL = (*GROUPS.values(), *_METHODS)
# Keywords whose value is a group and nothing else.
_GROUPED = ("io", "parallel", "debug")
# Keywords of wrap() that _translate() and _check_once() know, in every call.
_SPECIAL = ("config", "moments", "resume", "resume_step")


def spelled(public: str) -> str:
    """Return how a call writes a setting: "io.depth" as "io=lohan.IO(depth=)"."""
    group, _, name = public.rpartition(".")
    return f"{group}=lohan.{GROUPS[group].__name__}({name}=)" if group else f"{name}="


def written(flat: Mapping[str, Any]) -> str:
    """Return settings under their flat names as the keywords of a call that passes them."""
    tops: dict[str, str] = {}
    for name, value in flat.items():
        group, _, field = new_names().get(name, name).rpartition(".")
        said = f"{field}={value!r}"
        tops[group or field] = f"{tops[group]}, {said}" if group in tops else said
    return ", ".join(
        f"{top}=lohan.{GROUPS[top].__name__}({said})" if top in GROUPS else said
        for top, said in tops.items()
    )


def new_names() -> dict[str, str]:
    """Return the former names of settings, each with its public name."""
    moved = {name: said.public for name, said in _DECLARED.items() if said.public}
    return {**moved, **_OTHERS}


def flat(given: Mapping[str, Any], own: Iterable[str] = ()) -> dict[str, Any]:
    """Translate the keywords of a call into the names of Config and of opening/_request.

    Args:
        given: the keywords. Groups that are None are left out.
        own: keywords of the call that are no settings; they stay as they are.

    Raises:
        ModelError: a keyword is unknown (the message names the closest one), is not of its group's
            class, or is passed under its former name and its new one.
    """
    own, former = {*own, *_SPECIAL}, new_names()
    olds = {name for name in given if name in former}
    olds -= {"io"} if not isinstance(given.get("io"), str) else set()
    own |= {"groups"}  # None does not count as the former name
    olds -= {"groups"} if given.get("groups") is None else set()
    names = {public: name for name, public in former.items()}
    made: dict[str, Any] = {}
    for name in given.keys() - olds:
        value = given[name]
        if name in GROUPS and isinstance(
            value, tuple(_METHODS) if name == "method" else GROUPS[name]
        ):
            made |= _of_group(name, value)
        elif name in _GROUPED:
            if value is not None:
                shown = f"lohan.{GROUPS[name].__name__}"
                raise ModelError(f"{name}= is {value!r}, not {shown}: pass {name}={shown}(...)")
        elif name in names or name in _DECLARED or name in own:
            made[names.get(name, name)] = value
        else:
            meant = _meant(name, own)
            way_out = f"did you mean {meant}?" if meant else "help(lohan.wrap) lists the keywords"
            raise ModelError(f"{name}= is not a keyword of lohan.wrap: {way_out}")
    for name in sorted(olds):
        _check_once(name, former[name], given)
        _warn(f"{name}= is now {spelled(former[name])}")
        value, said = given[name], _DECLARED.get(name)
        if said is not None and said.flag is not None and isinstance(value, bool):
            value = said.flag[value]
        made[name] = value
    _translate(made, given)
    return made


def _of_group(group: str, given: Any) -> dict[str, Any]:
    """Return the settings of a group that differ from their defaults, under their flat names."""
    made: dict[str, Any] = {"method": _METHODS[type(given)]} if group == "method" else {}
    for field in dataclasses.fields(given):
        name, value = field.metadata.get(_FLAT, field.name), getattr(given, field.name)
        if value == field.default and isinstance(value, type(field.default)):
            continue
        said = _DECLARED.get(name)
        if said is None or said.flag is None:
            made[name] = value
            continue
        if not isinstance(value, bool):
            raise ModelError(f"{group}.{field.name} {value!r} must be True or False")
        made[name] = said.flag[value]
    return made


def _check_once(name: str, public: str, given: Mapping[str, Any]) -> None:
    """Reject a setting under its former name beside its new name, or beside its new group."""
    keyword = public.partition(".")[0]
    new = given.get(keyword)
    is_default = keyword == "moments" and new == "fp32"  # wrap() always has it
    if keyword != name and new is not None and not is_default:
        if "." in public and not isinstance(new, _ALL):
            return  # method="mezo"
        raise ModelError(
            f"{name}= is now {spelled(public)}, but the call has both {name}= and {keyword}=:"
            f" leave {name}= out"
        )


def _translate(made: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Translate what is not only a name: resume_step=, single_slot=, and their former spellings."""
    single, step = made.pop("single_slot", False), made.pop("resume_step", None)
    every, resume = made.get("commit_every"), made.get("resume")
    if not isinstance(single, bool):
        raise ModelError(f"io.single_slot {single!r} must be True or False")
    if single and every is not None:
        raise ModelError(
            f"io=lohan.IO(single_slot=True) commits no step, but the call also has commit_every="
            f"{every!r}: leave one of them out"
        )
    if single:
        made["commit_every"] = "never"
    elif every == "never":
        _warn('commit_every="never" is now io=lohan.IO(single_slot=True)')
    is_former = resume is not None and not isinstance(resume, bool)
    if is_former and step is not None:
        raise ModelError(
            f"the call has both resume={resume!r} and resume_step={step!r}: leave resume= out"
        )
    if step is not None:
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 1 << 63:
            raise ModelError(f"resume_step {step!r} must be None, or the number of a step")
        made["resume"] = f"step {step}"
    elif is_former and (found := _arguments.resume_of(resume)[1]) is not None:
        _warn(f"resume={resume!r} is now resume_step={found}")
    config = made.get("config")
    if isinstance(config, Config):
        changed = [n for n in _DECLARED if getattr(config, n) != getattr(_PLAIN, n)]
        names = ", ".join(spelled(_setting.public(Config, name)) for name in changed)
        _warn(f"config= is now keywords of its own: {names or 'leave it out'}")


def _meant(name: str, own: Iterable[str]) -> str:
    """Return how a call writes the setting that a wrong name is closest to; "": none is close."""
    words = {former: spelled(public) for former, public in new_names().items()}
    words |= {f.name: spelled(f"{g}.{f.name}") for g, c in GROUPS.items() for f in _fields(c)}
    for group in (Muon, Adafactor, RMSprop, Adagrad, SGD):
        words |= {f.name: f"method=lohan.{group.__name__}({f.name}=)" for f in _fields(group)}
    words |= {each: spelled(each) for each in (*Settings.__annotations__, *own)}
    words.pop("config", None)
    name = _ELSEWHERE.get(name, name)
    near = [name] if name in words else difflib.get_close_matches(name, words, 1, _NEAR)
    return words[near[0]] if near else ""


def _warn(text: str) -> None:
    """Warn of a former name, where the user's code calls lohan."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"lohan: {text}", DeprecationWarning, stacklevel=level)
