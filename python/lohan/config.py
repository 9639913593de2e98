"""What a user can set, with units and the reason for each default."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from lohan.common import _units

# In the order of the core's enum lh_engine_schedule.
SCHEDULES = ("optimized", "serial", "naive", "deferred", "auto")
# Of these, no update runs before step().
SCHEDULES_AT_STEP = ("serial", "deferred")
ACTIVATIONS = ("keep", "recompute")
# What is planned once a first step was looked at.
POLICIES = (
    "zero",
    "capuchin",
    "g10",
    "cpu_act",
    "naive",
    "fuyou",
    "lohan",
    "checkmate",
    "auto",
)


# Steps from one commit to the next where nobody ever gets there.
_RARELY = 1 << 62


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a session that have nothing to do with the optimizer's rule.

    None of them changes the numbers that training computes. Sizes in bytes may be strings, too:
    "16GB" (1000^3 bytes each), "16GiB" (1024^3), "500MB".

    Attributes:
        host_bytes: main memory for parameters, optimizer states and gradients on their way, in
            bytes. None: half of what is available, at most what the model can use.
        threads: workers of the CPU optimizer. None: one a core that this process may run on.
        nice: added to the workers' nice value, so that the training thread goes first where both
            want the same core.
        io: I/O backend: "auto" (the best that works here), "io_uring", "libaio" or "threads".
        io_depth: I/O requests in flight. 16 of 4 MiB moved 2 to 4 % (reads) and 4 to 7 % (writes)
            more than 8 on the virtual disk that was measured, 32 little more than 16; each doubling
            doubles what a demand read waits behind.
        transfer_bytes: largest I/O request, in bytes, a multiple of 1 MiB.
        commit_every: steps between commits; "auto" (each step), "never" (one slot: half the
            space, no crash safety) or "manual" (only `model.lohan.commit()` commits, not even the
            end: a store is then what the checkpoint that was saved with it refers to). Between
            commits what main memory keeps is not written: states of chunks that stay there,
            parameters where all of them do. A flush writes them.
        schedule: when updates run, with the same numbers: "optimized": as gradients arrive, reads,
            arithmetic and writes overlapped (LoHan IV-C); "naive": as they arrive, but each block
            is read, then computed, then written; "deferred": each just ahead of its block's next
            forward; "serial": in `step()`, which waits for them; "auto": as "optimized", and after
            the first steps a part of the blocks as "deferred" where that is found to be faster (it
            is where backward alone does not hide the updates, and memory has room for gradients
            that wait).
        accumulate: backwards a step: their gradients are summed in fp32, as p.grad would be (divide
            the loss by it for their mean), in 4 bytes of main memory a trainable parameter.
            `step()` may come earlier and takes what is there. "manual": those in
            `with model.no_sync():` and the one behind them. Updates wait for `step()`: schedule
            "serial" stays, the others become "deferred".
        loss_scaling: torch.amp.GradScaler scales the loss: updates wait for `step()`, as with
            accumulate, and for the norm that says whether a gradient overflowed.
        activations: what autograd keeps of a block's forward: "keep": all that operations save;
            "recompute": the block's inputs, from which the rest is computed again in backward (one
            more forward a step; the generators of torch, autocast and buffers as they were then).
            A dict has patterns (as of fnmatch) of layers' names, each with "keep" (it stays where
            it was computed), "recompute" or "swap" (it leaves, see swap_bytes). A layer is a module
            inside a block, or the block; the first pattern rules that fits its name or that of a
            module around it, and others stay. That is done with what the layer computes, its output
            included. Layers that stay or leave with all inside are skipped when their block is
            computed again. {"*.attn": "keep", "*": "recompute"}: all but attention.
            The name of a policy ("auto", or one of the papers', docs/planning.md): the first two
            steps are looked at with everything computed again, then it is decided what stays,
            leaves or is computed again (`model.lohan.plan()`); so is the first step of each further
            shape of batches. Without swap_bytes it may use a quarter of host_bytes, at most eight
            times the parameters' bytes.
            With anything but "keep", a model of transformers that is trained makes no cache of keys
            and values unless its caller says use_cache=True.
        profile: what those first steps showed lies beside the store. "reuse": the next run with the
            same model, shape and machine begins with it; "again": it looks anew.
        swap_bytes: main memory (of host_bytes) for activations that leave: what autograd keeps of
            64 KiB and more goes there while forward runs on, and is back when backward needs it.
            From an accelerator it stays there while there is room and else goes on to SSD; where
            computation is in main memory all of it goes to SSD. None: it stays where it is, but
            where a policy plans; 0: it stays.
        swap_ssd_bytes: room on SSD for it, taken at once. None: half of what is free, for a policy
            at most sixteen times swap_bytes; 0: none.
        device: where computation happens: "cpu" (main memory), "cuda", "cuda:1", or "emu", an
            emulated accelerator in main memory (to try what a GPU would do); a torch.device is
            taken, too. None: the CPU, also where torch sees a GPU (a Trainer's callback: the
            Trainer's device).
        device_bytes: device memory for parameters, kept saved tensors and gradients on their way
            out. None: what the device has. Where computation is in main memory: what a policy
            may leave there of saved tensors (None: most of what is available).
        device_param_bytes: of these, for parameters. None: half of device_bytes (of a GPU's free
            memory a quarter), at least what is in use at once.
        emu_bytes_per_s: speed of the emulated device's two links, in and out. None: as fast as
            memory is copied.
        emu_alloc_bytes_per_s: speed at which the emulated device allocates memory, standing still;
            looked at with without=("reuse",). None: at once.
        heap: "keep": where torch computes on the CPU, the C library's heap keeps what torch frees,
            for the whole process and to its end, so that a step finds its tensors' pages in place
            (15 % faster where that was measured, and a quarter more memory at the peak); "system":
            it is left as it is.
        frozen: parameters that require no gradient, of a model with weights=: "in_place": they are
            read from those files whenever they are needed, and are not in the store; "copy": they
            are copied into it (where the files are on a slower disk, or will go away).
        write_every: with method="mezo", steps between writes of the parameters to the store; in
            between the journal has what is new. "never": they stay where they are, and the journal
            alone grows. "auto": never where all of them fit in memory, else what the measured rates
            of the SSDs and of the generator ask for.
        runs: with method="mezo", the two runs of the model in a step: "together": in turns, block
            by block, each on a thread, so that a block is read once for both; "apart": one behind
            the other. "auto": together where not all parameters fit in memory.
        without: with method="mezo", parts of ZO2's schedule to leave out, to see what they bring:
            "overlap" (copies to the device begin when they are waited for), "reuse" (memory that a
            block leaves on the device is given back, and the next one's allocated; emu), "deferred"
            (each block is brought in once more for its update).
        verify: check the checksums of everything that is read.
        trace_events: events of the timeline that are kept; 0: none.
        allow_buffered: go on without O_DIRECT where the file system refuses it.
        allow_tmpfs: allow a store in main memory (for tests).
    """

    host_bytes: int | None = None
    threads: int | None = None
    nice: int = 0
    io: Literal["auto", "io_uring", "libaio", "threads"] = "auto"
    io_depth: int = 16
    transfer_bytes: int = 4 << 20
    commit_every: int | Literal["auto", "never", "manual"] = "auto"
    schedule: Literal["optimized", "serial", "naive", "deferred", "auto"] = "optimized"
    accumulate: int | Literal["manual"] = 1
    loss_scaling: bool = False
    activations: str | Mapping[str, str] = "keep"
    profile: Literal["reuse", "again"] = "reuse"
    swap_bytes: int | None = None
    swap_ssd_bytes: int | None = None
    device: str | None = None
    device_bytes: int | None = None
    device_param_bytes: int | None = None
    emu_bytes_per_s: tuple[int, int] | None = None
    emu_alloc_bytes_per_s: int | None = None
    heap: Literal["keep", "system"] = "keep"
    frozen: Literal["in_place", "copy"] = "in_place"
    write_every: int | Literal["auto", "never"] = "auto"
    runs: Literal["auto", "together", "apart"] = "auto"
    without: tuple[str, ...] = ()
    verify: bool = True
    trace_events: int = 0
    allow_buffered: bool = True
    allow_tmpfs: bool = False

    def __post_init__(self) -> None:
        """Sizes that are strings become numbers; what is no size is refused by name."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_bytes") and isinstance(value, str):
                object.__setattr__(self, field.name, _units.size(field.name, value))
        device: Any = self.device
        if type(device).__module__ == "torch" and type(device).__name__ == "device":
            object.__setattr__(self, "device", str(device))
        if str(device) == "cpu:0":  # as torch has it
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
        """Steps between the engine's commits; 0: none, with one slot."""
        named = {"auto": 1, "never": 0, "manual": _RARELY}
        if isinstance(self.commit_every, str):
            return named[self.commit_every]
        return self.commit_every
