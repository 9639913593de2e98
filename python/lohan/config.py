"""The user's settings, with their units and the reason for each default."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from lohan.common import _units
from lohan.common._setting import setting

# In the order of the core's enum lh_engine_schedule.
Schedule = Literal["optimized", "serial", "naive", "deferred", "auto"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
# With these schedules, no update runs before step().
SCHEDULES_AT_STEP = ("serial", "deferred")
ACTIVATIONS = ("keep", "recompute")
# Values of `activations` that plan after profiling the first step. The policies of other systems
# can be simulated (lohan simulate --policy), but not trained with.
POLICIES = ("fuyou", "lohan", "auto")

_SIZE_MAX = 1 << 60

# More steps between two commits than any run makes: commits never happen automatically.
_RARELY = 1 << 62
# commit_every="auto" until the session has chosen a number: no step commits.
CHOSEN_LATER = _RARELY


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a session that are independent of the optimizer's algorithm.

    None of them changes the numbers that training computes, except `on_nan` if gradients are not
    finite. Sizes in bytes may also be strings: "16GB" (units of 1000^3 bytes), "16GiB" (1024^3),
    "500MB".

    Attributes:
        host_bytes: main memory for parameters, optimizer states and gradients in transit, in
            bytes. None: half of the available memory, at most what the model can use.
        threads: worker threads of the CPU optimizer. None: one per core that this process may use;
            with device="cuda" three fewer, but at least half of the cores.
        nice: increment of the workers' nice value, so that the training thread has priority when
            both compete for a core. None: 5 with device="cuda", otherwise 0.
        io: the I/O backend: "auto" (the best one that works here), "io_uring", "libaio" or
            "threads".
        io_depth: I/O requests in flight. On the virtual disk that was measured, 16 requests of
            4 MiB moved 2 to 4 % (reads) and 4 to 7 % (writes) more than 8, and 32 little more than
            16; each doubling doubles the queue that a demand read waits for.
        transfer_bytes: the largest I/O request, in bytes; a multiple of 1 MiB.
        commit_every: steps between commits, or "auto" (every step; but where main memory keeps much
            of what a commit writes, so rarely that commits take at most half a percent of the time,
            and within two years at most the drives' endurance), "never" (a single slot: half the
            space, no crash safety) or "manual" (only `model.lohan.commit()` commits, closing
            does not: the store then always matches the checkpoint that was saved with it). State
            that stays in main memory is not written between commits: optimizer states of chunks
            that stay there, and the parameters if all of them do. A flush writes it.
        schedule: when updates run; the numbers are the same. "optimized": as gradients arrive, with
            reads, arithmetic and writes overlapped (LoHan IV-C). "naive": as gradients arrive, but
            each block is read, then computed, then written. "deferred": each just before its
            block's next forward. "serial": in `step()`, which waits for them. "auto": like
            "optimized", but after the first steps some blocks are "deferred" if that is found to
            be faster (it is when backward alone does not hide the updates and memory has room for
            the waiting gradients).
        accumulate: the number of backwards per step. Their gradients are summed in fp32, as in
            p.grad (divide the loss by this number to get the mean), using 4 bytes of main memory
            per trainable parameter. `step()` may come earlier and uses the gradients up to then.
            "manual": a step sums the backwards in `with model.no_sync():` and the one after them.
            Updates wait for `step()`: schedule "serial" is kept, any other becomes "deferred".
        order: the order of accumulated micro-batches in `model.lohan.accumulate()`. "horizontal":
            one after the other. "vertical": each block runs all of them before the next block
            does, so the parameters are read once for all; the inputs of the blocks of all
            micro-batches are kept until backward, as are the activations unless `activations` says
            otherwise. "auto": "vertical" if parameters do not stay in memory and what the
            micro-batches keep fits there together, which the first call of accumulate() measures.
            The numbers are the same.
        ema: the decay of an exponential moving average of the trained parameters, such as 0.999;
            None disables it. Each step computes average = decay * average + (1 - decay) * parameter
            in fp32, with the bits of torch.optim.swa_utils.AveragedModel; the first step
            begins the averages as copies. They are in the store, 4 bytes an element, which each
            step reads and writes as well. lohan.ema(model) evaluates them.
        loss_scaling: True if torch.amp.GradScaler scales the loss. Updates then wait for `step()`,
            as with accumulate, and for the norm that shows whether a gradient overflowed.
        on_nan: what a step does whose gradients are not finite (NaN or infinity). "raise": the
            session ends with a NonFiniteError that names the parameter and the step, which is not
            committed: training can be resumed from the last commit. If the norm of all gradients is
            computed (max_grad_norm, loss_scaling), the error comes in `step()` before any update,
            so that zero_grad() discards the step, and training can continue. "skip": `step()`
            discards the step and prints a line; this needs the norm, and so a schedule whose
            updates wait for `step()`. "accept": as in torch, the parameter becomes NaN.
        activations: what autograd keeps of a block's forward. "keep": everything that operations
            save. "recompute": only the block's inputs; the rest is recomputed in backward (one more
            forward per step, with torch's generators, autocast and buffers restored to their state
            in the first forward).
            A dict maps patterns (as in fnmatch) of layer names to "keep" (activations stay where
            they were computed), "recompute" or "swap" (they are offloaded, see swap_bytes). A layer
            is a module inside a block, or the block itself. The first pattern that matches the name
            of the layer or of an enclosing module applies; without a match, activations are kept.
            It applies to everything the layer computes, including its output. Layers that are kept
            or swapped with everything inside them are skipped when their block is recomputed.
            {"*.attn": "keep", "*": "recompute"} recomputes everything except attention.
            The name of a policy ("auto", or "lohan" or "fuyou", those of the papers; see
            docs/planning.md): two steps are profiled with everything recomputed, then the policy
            decides what is kept, offloaded or recomputed (`model.lohan.plan()`). The first step of
            each further batch shape is profiled as well. Without swap_bytes, a policy may use a
            quarter of host_bytes, at most eight times the size of the parameters.
            With any value but "keep", a transformers model in training mode does not build a cache
            of keys and values unless the caller passes use_cache=True.
        profile: the measurements of those first steps are stored beside the store. "reuse": the
            next run with the same model, shape and machine starts from them. "again": it measures
            again.
        swap_bytes: main memory (part of host_bytes) for offloaded activations: saved tensors of
            64 KiB and more are copied there while forward continues, and are back when backward
            needs them. Activations of an accelerator stay in main memory while there is room, and
            go to SSD otherwise; if the model computes in main memory, all of them go to SSD. None:
            nothing is offloaded, except by a policy. 0: nothing is offloaded.
        swap_ssd_bytes: space on SSD for offloaded activations, allocated at the start; each tensor
            takes a multiple of 1 MiB. None: half of the free space, for a policy at most sixteen
            times swap_bytes. 0: none, so they stay in main memory.
        device: where computation happens: "cpu" (main memory), "cuda", "cuda:1", or "emu", an
            accelerator emulated in main memory (to test without a GPU). A torch.device is accepted,
            too. None: the CPU, even if torch sees a GPU (for a Trainer's callback: the Trainer's
            device).
        device_bytes: limit on the device memory for parameters, kept saved tensors and outgoing
            gradients together. None: the device's memory. If the model computes in main memory: the
            saved tensors that a policy may keep there (None: most of the available memory).
        device_param_bytes: the part of device_bytes for parameters. None: half of it (a quarter of
            a GPU's free memory), at least what is in use at the same time. An integrated GPU reads
            parameters in main memory, and this setting lets it get copies instead.
        emu_bytes_per_s: the speed of the emulated device's two links, in and out. None: the speed
            of a memory copy.
        emu_alloc_bytes_per_s: the speed at which the emulated device allocates memory, while it
            stands still; used only with ablate=("reuse",). None: allocation takes no time.
        heap: "keep": if torch computes on the CPU, the C library's heap keeps the memory that torch
            frees, for the whole process and until its end, so that each step reuses pages that are
            already mapped (15 % faster where measured, with a 25 % higher memory peak). "system":
            the heap is left unchanged.
        frozen: how to store parameters that require no gradient, for a model with weights=.
            "in_place": they are read from those files whenever they are needed, and are not in the
            store. "packed": the same, and the memory of host_bytes that training does not need
            keeps quantized parameters in their packed bytes, which are then not read again.
            "copy": they are copied into the store (if the files are on a slower disk or will be
            removed).
        share: with several processes on a machine and AdamW. "off": each has a store, parameters
            and states of its own. "on": the process with the lowest rank on a machine has them for
            all processes of the machine, which read its parameters in its memory; host_bytes is
            then the machine's (docs/several-processes.md).
        gather: with share="on" and an accelerator for each process, how blocks are copied to the
            accelerators. "host": each process copies whole blocks from main memory. "shards": each
            copies a part of the block over its own link to main memory, and gets the other parts
            from the other accelerators. "auto": the processes of each machine measure both ways
            when they wrap, and use the faster one (docs/several-processes.md).
        replicas: with several processes and AdamW. "all": each process has all parameters and all
            states of the optimizer. "parameters": each process has all parameters, but the states
            of its share of them only; it updates these, and sends the new values to the others.
            With share="on", each machine has a share. Updates run in `step()`
            (docs/several-processes.md).
        write_every: with method="mezo", steps between writes of the parameters to the store; the
            journal holds the steps in between. "never": parameters are not written, only the
            journal grows. "auto": never if all parameters fit in memory, otherwise an interval
            chosen from the measured rates of the SSDs and of the generator.
        runs: with method="mezo", how the two runs of the model in a step are executed. "together":
            they alternate block by block, each on its own thread, so that a block is read once for
            both. "apart": one after the other. "auto": together unless all parameters fit in
            memory.
        ablate: with method="mezo", parts of ZO2's schedule to disable, to measure their effect:
            "overlap" (copies to the device begin only when they are waited for), "reuse" (device
            memory is freed after each block and allocated for the next; emu only), "deferred" (each
            block is loaded once more for its update).
        peer_timeout_s: with several processes, how long another process may be silent before it
            counts as lost, in seconds. On the same machine a process that ends is noticed at once.
            wrap() waits ten times as long for the others to come, and at least 600 seconds.
        wear_budget: the bytes that the run may write to the drives of its store, counted over all
            sessions that resume it: "50TB", or "1TB/day" for each day (UTC). Training stops with
            lohan.WearBudgetError at the last step that does not exceed it. With several processes,
            each counts what it writes. None: no limit.
        ssd_endurance_bytes: the bytes that may be written to one drive in its life (TBW), such as
            "600TB", to compare with what steps write. None: as the drive reports, if it does.
        step_records: keep figures of each step in a file beside the store, for `lohan watch`.
        verify: verify the checksums of everything that is read.
        trace_events: the number of timeline events to keep; 0: none.
        allow_buffered: continue without O_DIRECT if the file system does not support it.
        allow_tmpfs: allow a store in main memory (for tests).
    """

    host_bytes: int | None = setting(
        None,
        "Memory and speed",
        "half of the available memory, at most what the model can use",
        "ceiling on main memory for parameters, optimizer states and gradients in flight; more "
        "than the machine has, or than a container may use, is refused",
        least=1,
        most=_SIZE_MAX,
    )
    threads: int | None = setting(
        None,
        "Memory and speed",
        'one per core that the process may use; with `device="cuda"` three fewer, but at least '
        "half",
        "workers of the CPU optimizer",
        least=1,
        most=256,
    )
    nice: int | None = setting(
        None,
        "Memory and speed",
        '5 with `device="cuda"`, otherwise 0',
        "added to the workers' nice value, so that the training thread goes first on a shared core",
        least=0,
        most=19,
    )
    io: Literal["auto", "io_uring", "libaio", "threads"] = setting(
        "auto",
        "Disks",
        '`"auto"`',
        'I/O backend: the best that works here, or `"io_uring"`, `"libaio"`, `"threads"`',
    )
    io_depth: int = setting(
        16,
        "Disks",
        "16",
        "I/O requests in flight",
        least=1,
        most=512,  # a queue holds 1024 requests, including those of a commit
    )
    transfer_bytes: int = setting(
        4 << 20,
        "Disks",
        "4 MiB",
        "largest I/O request, a multiple of 1 MiB",
        least=1 << 20,
        most=64 << 20,
        multiple=1 << 20,
    )
    commit_every: int | Literal["auto", "never", "manual"] = setting(
        "auto",
        "Commits",
        '`"auto"`: every step, or [rarely if commits cost much or write much in a '
        "day](checkpoints.md#how-often-steps-are-committed)",
        'steps between commits; `"manual"`: only `model.lohan.commit()` commits; `"never"`: '
        "half the space on the SSDs, and nothing to resume after a crash "
        '([Checkpoints](checkpoints.md)); not where processes of a machine have `share="on"`',
        least=1,
        most=(1 << 63) - 1,
        what="a number of steps of at least 1",
    )
    schedule: Schedule = setting(
        "optimized",
        "Memory and speed",
        '`"optimized"`',
        "when updates run, see below",
    )
    accumulate: int | Literal["manual"] = setting(
        1,
        "Accumulation and scaling",
        "1",
        "backward passes per step; their gradients are summed in fp32, in 4 bytes of main "
        'memory per trainable parameter. `"manual"`: those inside `with model.no_sync():` and '
        "the one after it",
        least=1,
        most=(1 << 31) - 1,
        what="a number of backwards per step, at least 1",
    )
    order: Literal["horizontal", "vertical", "auto"] = setting(
        "horizontal",
        "Accumulation and scaling",
        '`"horizontal"`',
        'the order of the micro-batches in `model.lohan.accumulate()`. `"vertical"`: each '
        "block runs all of them before the next block does, so parameters are read once a step "
        '([below](#one-pass-for-all-micro-batches)); `"auto"`: this order where it reads less '
        "and fits",
    )
    ema: float | None = setting(
        None,
        "Accumulation and scaling",
        "`None`",
        "the decay of an [exponential moving "
        "average](checkpoints.md#averages-of-the-parameters) of the trained parameters, which "
        "is kept in the store",
        least=0,
        most=1,
        what="None, or the decay of the averages: a number from 0 to 1, such as 0.999",
    )
    loss_scaling: bool = setting(
        False,
        "Accumulation and scaling",
        "`False`",
        "`torch.amp.GradScaler` scales the loss",
    )
    on_nan: Literal["raise", "skip", "accept"] = setting(
        "raise",
        "Accumulation and scaling",
        '`"raise"`',
        "what happens to a step with a gradient that is NaN or infinite "
        "([below](#gradients-that-are-not-finite))",
    )
    activations: str | Mapping[str, str] = setting(
        "keep",
        "Activations",
        '`"keep"`',
        '`"keep"`, `"recompute"`, a dict of layer patterns, or a policy: `"auto"`, `"lohan"` '
        'or `"fuyou"` ([the choices](larger-than-memory.md#activations))',
    )
    profile: Literal["reuse", "again"] = setting(
        "reuse",
        "Activations",
        '`"reuse"`',
        '`"reuse"`: start with the profile of an earlier run with the same model, shape and '
        'machine, stored beside the store; `"again"`: profile once more',
    )
    swap_bytes: int | None = setting(
        None,
        "Activations",
        "nothing leaves; under a policy, at most a quarter of `host_bytes` and eight times the "
        "parameters' bytes",
        "main memory, out of `host_bytes`, for activations that leave",
        least=0,
        most=_SIZE_MAX,
    )
    swap_ssd_bytes: int | None = setting(
        None,
        "Activations",
        "half of the free space; under a policy, at most 16 times `swap_bytes`; less if "
        "another process takes the space first",
        "space on SSD for activations, allocated at `wrap`, of which each tensor takes a "
        "multiple of 1 MiB; 0: none, so they stay in main memory",
        least=0,
        most=_SIZE_MAX,
    )
    device: str | None = setting(
        None,
        "Devices",
        "the CPU",
        '`"cpu"`, `"cuda"`, `"cuda:1"`, `"emu"` or a `torch.device` ([GPUs and the emulated '
        "accelerator](devices.md))",
    )
    device_bytes: int | None = setting(
        None,
        "Devices",
        "what the device has",
        "limit on the device memory for parameters, kept saved tensors and gradients on their "
        "way out. On the CPU: what a policy may leave there of saved tensors",
        least=1,
        most=_SIZE_MAX,
    )
    device_param_bytes: int | None = setting(
        None,
        "Devices",
        "half of `device_bytes` (on a GPU a quarter of its free memory less a reserve), at "
        "least what is in use at once",
        "the part of `device_bytes` for parameters. If it is set, an [integrated "
        "GPU](devices.md#an-integrated-gpu) gets copies, too",
        least=1,
        most=_SIZE_MAX,
    )
    emu_bytes_per_s: tuple[int, int] | None = setting(
        None,
        "Devices",
        "as fast as memory is copied",
        "speed of the emulated device's links, `(in, out)`",
    )
    emu_alloc_bytes_per_s: int | None = setting(
        None,
        "Devices",
        "instantaneous",
        "speed at which the emulated device allocates memory",
    )
    heap: Literal["keep", "system"] = setting(
        "keep",
        "Memory and speed",
        '`"keep"`',
        '`"keep"`: where torch computes on the CPU, the C heap keeps the memory that torch '
        "frees, for the whole process (15 % faster where measured, a quarter more memory at "
        'the peak); `"system"`: leave the heap alone',
    )
    frozen: Literal["in_place", "packed", "copy"] = setting(
        "in_place",
        "Disks",
        '`"in_place"`',
        "frozen parameters of a model with `weights=`: read from those files whenever they are "
        'needed; with `"packed"` the same, and [quantized ones stay in memory in their packed '
        "bytes](lora.md#packed-bytes-in-main-memory) as far as `host_bytes` allows; with "
        '`"copy"` copied into the store',
    )
    share: Literal["off", "on"] = setting(
        "off",
        "Several processes",
        '`"off"`',
        '`"on"`: the processes of a machine '
        "[share](several-processes.md#several-processes-on-one-machine) one store, one copy of "
        "the parameters and one set of states",
    )
    gather: Literal["host", "shards", "auto"] = setting(
        "host",
        "Several processes",
        '`"host"`',
        'with `share="on"` and an accelerator in each process, `"shards"`: each process copies '
        "[a part of each block](several-processes.md#gathering-blocks-on-the-accelerators) "
        'from main memory, and gets the rest from the other accelerators; `"auto"`: the faster '
        "way, measured in `wrap`",
    )
    replicas: Literal["all", "parameters"] = setting(
        "all",
        "Several processes",
        '`"all"`',
        '`"parameters"`: each process has all parameters, but a [part of the optimizer\'s '
        "states](several-processes.md#dividing-the-optimizers-states)",
    )
    write_every: int | Literal["auto", "never"] = setting(
        "auto",
        "Zeroth-order training",
        '`"auto"`',
        'steps between writes of the parameters to the store; `"never"`: only the journal grows',
        least=1,
        most=(1 << 31) - 1,
        what="a number of steps of at least 1",
    )
    runs: Literal["auto", "together", "apart"] = setting(
        "auto",
        "Zeroth-order training",
        '`"auto"`',
        'the two runs of the model in a step: `"together"`, block by block, or `"apart"`, one '
        "after the other",
    )
    ablate: tuple[str, ...] = setting(
        (),
        "Zeroth-order training",
        "nothing",
        'parts of the schedule to disable, to measure their effect: `"overlap"`, `"reuse"`, '
        '`"deferred"`',
    )
    peer_timeout_s: float = setting(
        30.0,
        "Several processes",
        "30",
        "seconds that another process may be silent before it counts as lost. In `wrap` a "
        "process waits ten times as long for the others to come, and at least 600 seconds",
        least=1,
        what="a number of seconds of at least 1",
    )
    wear_budget: int | str | None = setting(
        None,
        "Disks",
        "no limit",
        "the bytes that the run may write to the drives of its store, over all its sessions: "
        '`"50TB"`, or `"1TB/day"` ([below](#wear))',
    )
    ssd_endurance_bytes: int | None = setting(
        None,
        "Disks",
        "as the drive reports",
        'the bytes that may be written to one drive in its life, such as `"600TB"` (TBW in its '
        "data sheet)",
        least=1,
        most=_SIZE_MAX,
    )
    step_records: bool = setting(
        True,
        "What is recorded",
        "`True`",
        "keep figures of each step in a small file beside the store, for [`lohan watch`](watch.md)",
    )
    verify: bool = setting(
        True,
        "Commits",
        "`True`",
        "compare the checksum of everything that is read",
    )
    trace_events: int = setting(
        0,
        "What is recorded",
        "0",
        "events of the timeline to keep ([how to read it](command-line.md#the-timeline))",
        least=0,
        most=1 << 62,
    )
    allow_buffered: bool = setting(
        True,
        "Disks",
        "`True`",
        "use a file system without direct I/O through the page cache",
    )
    allow_tmpfs: bool = setting(
        False,
        "Disks",
        "`False`",
        "accept a store in main memory (for tests)",
    )

    def __post_init__(self) -> None:
        """Convert sizes given as strings to numbers; an invalid size raises an error."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_bytes") and isinstance(value, str):
                object.__setattr__(self, field.name, _units.size(field.name, value))
        device: Any = self.device
        if type(device).__module__ == "torch" and type(device).__name__ == "device":
            object.__setattr__(self, "device", str(device))
        if str(device) == "cpu:0":  # as torch may spell it
            object.__setattr__(self, "device", "cpu")
        rate: object = self.emu_alloc_bytes_per_s
        if isinstance(rate, str):
            made = _units.size("emu_alloc_bytes_per_s", rate, _units.RATES)
            object.__setattr__(self, "emu_alloc_bytes_per_s", made)
        links: object = self.emu_bytes_per_s
        if isinstance(links, tuple) and any(isinstance(rate, str) for rate in links):
            rates = tuple(
                _units.size("emu_bytes_per_s", rate, _units.RATES)
                if isinstance(rate, str)
                else rate
                for rate in links
            )
            object.__setattr__(self, "emu_bytes_per_s", rates)

    @property
    def commit_steps(self) -> int:
        """Steps between the engine's commits; 0: no commits, a single slot."""
        named = {"auto": 1, "never": 0, "manual": _RARELY}
        if isinstance(self.commit_every, str):
            return named[self.commit_every]
        return self.commit_every

    @property
    def sharers(self) -> int:
        """The number of processes of the run that share this machine's memory, disks and cores."""
        return 1

    @property
    def process_count(self) -> int:
        """The number of processes that exchange gradients."""
        return 1

    @property
    def room_sharers(self) -> int:
        """The number of processes on this machine that may offload activations to its disks."""
        return 1

    @property
    def sums_gradients(self) -> bool:
        """Whether a step's gradients are summed in main memory before an update uses them."""
        return self.accumulate != 1

    @property
    def has_policy(self) -> bool:
        """Whether a policy plans activations."""
        return self.activations in POLICIES

    @property
    def holds_backward(self) -> bool:
        """Whether all gradients of a backward may have to wait for other processes in memory."""
        return False

    @property
    def part_count(self) -> int:
        """The number of parts into which the optimizer's states are divided."""
        return 1

    @property
    def part(self) -> int:
        """Which part of the states this process has, from 0."""
        return 0


@dataclasses.dataclass(frozen=True)
class SharedConfig(Config):
    """The settings of one of several processes.

    Attributes:
        processes: the number of processes of the run.
        processes_here: how many of them are on this machine.
    """

    processes: int = 2
    processes_here: int = 1

    @property
    def sharers(self) -> int:
        """The number of processes of the run that share this machine's memory, disks and cores."""
        return self.processes_here

    @property
    def room_sharers(self) -> int:
        """The number of processes on this machine that may offload activations to its disks."""
        return self.processes_here


@dataclasses.dataclass(frozen=True)
class ReplicaConfig(SharedConfig):
    """The settings of one of several processes that exchange gradients.

    Attributes:
        part_count: the number of parts into which the optimizer's states are divided.
        part: which of them this process has, from 0; with share="on", which its machine has.
    """

    part_count: int = 1
    part: int = 0

    @property
    def process_count(self) -> int:
        """The number of processes that exchange gradients."""
        return self.processes

    @property
    def sharers(self) -> int:
        """The number of processes of the run that share this machine's memory, disks and cores."""
        return 1 if self.share == "on" else self.processes_here

    @property
    def sums_gradients(self) -> bool:
        """Whether a step's gradients are summed in main memory before an update uses them."""
        return True


@dataclasses.dataclass(frozen=True)
class GroupConfig(ReplicaConfig):
    """The settings of one of several processes, some of which have modules that others lack."""

    @property
    def holds_backward(self) -> bool:
        """Whether all gradients of a backward may have to wait for other processes in memory."""
        return True


@dataclasses.dataclass(frozen=True)
class MateConfig(ReplicaConfig):
    """The settings of a process that reads the parameters of another one of its machine."""

    @property
    def commit_steps(self) -> int:
        """The engine never commits: the store belongs to the other process."""
        return 0

    @property
    def sums_gradients(self) -> bool:
        """Whether a step's gradients are summed in main memory: the other process sums them."""
        return False
