"""The user's settings, with their units and the reason for each default."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from lohan.common import _units
from lohan.common._setting import public, setting

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
    finite, and `sum_order`, by the rounding of sums. Sizes in bytes may also be strings: "16GB"
    (units of 1000^3 bytes), "16GiB" (1024^3), "500MB".

    The names are lohan's own. Users write the `public` names of the declarations, as keywords of
    `lohan.wrap` or in the groups of lohan.common._keywords, whose docstrings describe each setting.
    """

    host_bytes: int | None = setting(
        None,
        "half of the available memory, at most what the model can use",
        "ceiling on main memory for parameters, optimizer states and gradients in flight; more "
        "than the machine has, or than a container may use, is refused",
        least=1,
        most=_SIZE_MAX,
    )
    threads: int | None = setting(
        None,
        'one per core that the process may use; with `device="cuda"` three fewer, but at least '
        "half",
        "workers of the CPU optimizer",
        least=1,
        most=256,
        public="debug.threads",
    )
    nice: int | None = setting(
        None,
        '5 with `device="cuda"`, otherwise 0',
        "added to the workers' nice value, so that the training thread goes first on a shared core",
        least=0,
        most=19,
        public="debug.nice",
    )
    io: Literal["auto", "io_uring", "libaio", "threads"] = setting(
        "auto",
        '`"auto"`',
        'I/O backend: the best that works here, or `"io_uring"`, `"libaio"`, `"threads"`',
        public="io.backend",
    )
    io_depth: int = setting(
        16,
        "16",
        "I/O requests in flight",
        least=1,
        most=512,  # a queue holds 1024 requests, including those of a commit
        public="io.depth",
    )
    transfer_bytes: int = setting(
        4 << 20,
        "4 MiB",
        "largest I/O request, a multiple of 1 MiB",
        least=1 << 20,
        most=64 << 20,
        multiple=1 << 20,
        public="io.transfer_bytes",
    )
    commit_every: int | Literal["auto", "never", "manual"] = setting(
        "auto",
        '`"auto"`: every step, or [rarely if commits cost much or write much in a '
        "day](checkpoints.md#how-often-steps-are-committed)",
        'steps between commits; `"manual"`: only `model.lohan.commit()` commits '
        "([Checkpoints](checkpoints.md))",
        least=1,
        most=(1 << 63) - 1,
        what="a number of steps of at least 1",
        former=("never",),
    )
    schedule: Schedule = setting(
        "optimized",
        '`"optimized"`',
        "when updates run, see below",
    )
    clip: Literal["wait", "repeat"] = setting(
        "wait",
        '`"wait"`',
        '`"repeat"`: with `max_grad_norm`, updates run in backward as without it, and a step '
        "whose norm is larger is undone and repeated ([below](#clipping))",
        public="io.clip",
    )
    accumulate: int | Literal["manual"] = setting(
        1,
        "1",
        "backward passes per step; their gradients are summed in fp32, in 4 bytes of main "
        'memory per trainable parameter. `"manual"`: those inside `with model.no_sync():` and '
        "the one after it",
        least=1,
        most=(1 << 31) - 1,
        what="a number of backwards per step, at least 1",
        public="gradient_accumulation_steps",
    )
    order: Literal["horizontal", "vertical", "auto"] = setting(
        "horizontal",
        '`"horizontal"`',
        'the order of the micro-batches in `model.lohan.accumulate()`. `"vertical"`: each '
        "block runs all of them before the next block does, so parameters are read once a step "
        '([below](#one-pass-for-all-micro-batches)); `"auto"`: this order where it reads less '
        "and fits",
    )
    ema: float | None = setting(
        None,
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
        "`False`",
        "`torch.amp.GradScaler` scales the loss",
    )
    on_nan: Literal["raise", "skip", "accept"] = setting(
        "raise",
        '`"raise"`',
        "what happens to a step with a gradient that is NaN or infinite "
        "([below](#gradients-that-are-not-finite))",
    )
    activations: str | Mapping[str, str] = setting(
        "keep",
        '`"keep"`',
        '`"keep"`, `"recompute"`, a dict of layer patterns, or a policy: `"auto"`, `"lohan"` '
        'or `"fuyou"` ([the choices](larger-than-memory.md#activations))',
    )
    profile: Literal["reuse", "again"] = setting(
        "reuse",
        '`"reuse"`',
        '`"reuse"`: start with the profile of an earlier run with the same model, shape and '
        'machine, stored beside the store; `"again"`: profile once more',
        public="debug.profile",
    )
    swap_bytes: int | None = setting(
        None,
        "nothing leaves; under a policy, at most a quarter of `host_bytes` and eight times the "
        "parameters' bytes",
        "main memory, out of `host_bytes`, for activations that leave",
        least=0,
        most=_SIZE_MAX,
        public="activation_offload_bytes",
    )
    swap_ssd_bytes: int | None = setting(
        None,
        "half of the free space; under a policy, at most 16 times "
        "`activation_offload_bytes`; less if "
        "another process takes the space first",
        "space on SSD for activations, allocated at `wrap`, of which each tensor takes a "
        "multiple of 1 MiB; 0: none, so they stay in main memory",
        least=0,
        most=_SIZE_MAX,
        public="io.activation_ssd_bytes",
    )
    device: str | None = setting(
        None,
        "the CPU",
        '`"cpu"`, `"cuda"`, `"cuda:1"`, `"emu"` or a `torch.device` ([GPUs and the emulated '
        "accelerator](devices.md))",
    )
    device_bytes: int | None = setting(
        None,
        "what the device has",
        "limit on the device memory for parameters, kept saved tensors and gradients on their "
        "way out. On the CPU: what a policy may leave there of saved tensors",
        least=1,
        most=_SIZE_MAX,
    )
    device_param_bytes: int | None = setting(
        None,
        "half of `device_bytes` (on a GPU a quarter of its free memory less a reserve), at "
        "least what is in use at once",
        "the part of `device_bytes` for parameters. If it is set, an [integrated "
        "GPU](devices.md#an-integrated-gpu) gets copies, too",
        least=1,
        most=_SIZE_MAX,
        public="debug.device_param_bytes",
    )
    emu_bytes_per_s: tuple[int, int] | None = setting(
        None,
        "as fast as memory is copied",
        "speed of the emulated device's links, `(in, out)`",
        public="debug.emu_bytes_per_s",
    )
    emu_alloc_bytes_per_s: int | None = setting(
        None,
        "instantaneous",
        "speed at which the emulated device allocates memory",
        public="debug.emu_alloc_bytes_per_s",
    )
    heap: Literal["keep", "system"] = setting(
        "keep",
        '`"keep"`',
        '`"keep"`: where torch computes on the CPU, the C heap keeps the memory that torch '
        "frees, for the whole process (15 % faster where measured, a quarter more memory at "
        'the peak); `"system"`: leave the heap alone',
        public="debug.heap",
    )
    frozen: Literal["in_place", "packed", "copy"] = setting(
        "in_place",
        '`"in_place"`',
        "frozen parameters of a model with `weights=`: read from those files whenever they are "
        'needed; with `"packed"` the same, and [quantized ones stay in memory in their packed '
        "bytes](lora.md#packed-bytes-in-main-memory) as far as `host_bytes` allows; with "
        '`"copy"` copied into the store',
        public="io.frozen",
    )
    share: Literal["off", "on"] = setting(
        "off",
        "`False`",
        "`True`: the processes of a machine "
        "[share](several-processes.md#several-processes-on-one-machine) one store, one copy of "
        "the parameters and one set of states",
        public="parallel.share",
        flag=("off", "on"),
    )
    gather: Literal["host", "shards", "auto"] = setting(
        "host",
        '`"host"`',
        'with `share=True` and an accelerator in each process, `"shards"`: each process copies '
        "[a part of each block](several-processes.md#gathering-blocks-on-the-accelerators) "
        'from main memory, and gets the rest from the other accelerators; `"auto"`: the faster '
        "way, measured in `wrap`",
        public="parallel.gather",
    )
    replicas: Literal["all", "parameters"] = setting(
        "all",
        "`False`",
        "`True`: each process has all parameters, but a [part of the optimizer's "
        "states](several-processes.md#dividing-the-optimizers-states)",
        public="parallel.shard_optimizer",
        flag=("all", "parameters"),
    )
    sum_order: Literal["sequential", "tree"] | None = setting(
        None,
        'as in the store; in a new one `"sequential"`',
        'the order in which the gradients of a step are added: `"sequential"`, one micro-batch '
        'after the other, or `"tree"`, where [each process adds up its own '
        "first](several-processes.md#adding-up-gradients-before-they-are-sent) and sends less",
        public="parallel.sum_order",
    )
    write_every: int | Literal["auto", "never"] = setting(
        "auto",
        '`"auto"`',
        'steps between writes of the parameters to the store; `"never"`: only the journal grows',
        least=1,
        most=(1 << 31) - 1,
        what="a number of steps of at least 1",
        public="method.write_every",
    )
    runs: Literal["auto", "together", "apart"] = setting(
        "auto",
        '`"auto"`',
        'the two runs of the model in a step: `"together"`, block by block, or `"apart"`, one '
        "after the other",
        public="method.runs",
    )
    ablate: tuple[str, ...] = setting(
        (),
        "nothing",
        'parts of the schedule to disable, to measure their effect: `"overlap"`, `"reuse"`, '
        '`"deferred"`',
        public="debug.ablate",
    )
    peer_timeout_s: float = setting(
        30.0,
        "30",
        "seconds that another process may be silent before it counts as lost. In `wrap` a "
        "process waits ten times as long for the others to come, and at least 600 seconds",
        least=1,
        what="a number of seconds of at least 1",
        public="parallel.timeout_s",
    )
    wear_budget: int | str | None = setting(
        None,
        "no limit",
        "the bytes that the run may write to the drives of its store, over all its sessions: "
        '`"50TB"`, or `"1TB/day"` ([below](#wear))',
        public="io.wear_budget",
    )
    ssd_endurance_bytes: int | None = setting(
        None,
        "as the drive reports",
        'the bytes that may be written to one drive in its life, such as `"600TB"` (TBW in its '
        "data sheet)",
        least=1,
        most=_SIZE_MAX,
        public="io.ssd_endurance_bytes",
    )
    step_records: bool = setting(
        True,
        "`True`",
        "keep figures of each step in a small file beside the store, for [`lohan watch`](watch.md)",
        public="debug.step_records",
    )
    verify: bool = setting(
        True,
        "`True`",
        "compare the checksum of everything that is read",
        public="io.verify",
    )
    trace_events: int = setting(
        0,
        "0",
        "events of the timeline to keep ([how to read it](command-line.md#the-timeline))",
        least=0,
        most=1 << 62,
        public="debug.trace_events",
    )
    allow_buffered: bool = setting(
        True,
        "`True`",
        "use a file system without direct I/O through the page cache",
        public="io.allow_buffered",
    )
    allow_tmpfs: bool = setting(
        False,
        "`False`",
        "accept a store in main memory (for tests)",
        public="io.allow_tmpfs",
    )

    def __post_init__(self) -> None:
        """Convert sizes given as strings to numbers; an invalid size raises an error."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_bytes") and isinstance(value, str):
                size = _units.size(public(Config, field.name), value)
                object.__setattr__(self, field.name, size)
        device: Any = self.device
        if type(device).__module__ == "torch" and type(device).__name__ == "device":
            object.__setattr__(self, "device", str(device))
        if str(device) == "cpu:0":  # as torch may spell it
            object.__setattr__(self, "device", "cpu")
        rate: object = self.emu_alloc_bytes_per_s
        if isinstance(rate, str):
            made = _units.size("debug.emu_alloc_bytes_per_s", rate, _units.RATES)
            object.__setattr__(self, "emu_alloc_bytes_per_s", made)
        links: object = self.emu_bytes_per_s
        if isinstance(links, tuple) and any(isinstance(rate, str) for rate in links):
            rates = tuple(
                _units.size("debug.emu_bytes_per_s", rate, _units.RATES)
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
    def tree_leaf_count(self) -> int:
        """The most micro-batches of a process in a step, if a tree adds their gradients; else 0."""
        return self.accumulate if self.sum_order == "tree" and self.accumulate != "manual" else 0

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

    @property
    def owners(self) -> tuple[int, ...]:
        """The ranks that have parameters; with divided states, in the order of the parts."""
        return (0,)


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
        owners: the ranks that have parameters; with divided states, in the order of the parts.
        machines: by rank, the number of the process's machine.
        holds_backward: whether all gradients of a backward may have to wait for other processes in
            memory: some processes have modules that others lack.
    """

    part_count: int = 1
    part: int = 0
    owners: tuple[int, ...] = ()
    machines: tuple[int, ...] = ()
    holds_backward: bool = False

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
