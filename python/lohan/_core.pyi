"""Types of lohan._core. tests/py/test_stub.py holds every name here against the module."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, NoReturn, TypeVar

from torch import Tensor

ELEMENT_ALIGN: int
SCALED_ALIGN: int
SCALES_ELEMENTS: int
PARAM_ALIGN: int
BLOCK_BYTES: int
CHECKSUM_BYTES: int
IN_PLACE_ALIGN: int
IN_PLACE_FILE_COUNT_MAX: int
TRACE_COUNT_MAX: int

# (-errno, message) -> the exception to raise.
_Raiser = Callable[[int, str, bool], Exception]
# (bytes, elements, dtype, always, announced, family, param_first, param_count,
# extents P R M V, group)
_Unit = tuple[Any, ...]
# (unit, first, count, group, number)
_Param = tuple[float, ...]
_T = TypeVar("_T")
_Dtype = Literal["float32", "bfloat16", "float16"]
_States = Literal["fp32", "bf16", "8bit", "4bit"]

class Store:
    def __new__(cls, *args: NoReturn) -> Store: ...
    def read(self, extent: int, offset: int, address: int, nbytes: int, /) -> None: ...
    def write(self, extent: int, offset: int, address: int, nbytes: int, /) -> None: ...
    def check_names(self) -> None: ...
    def commit(self, step: int, scalars: bytes, /) -> None: ...
    def describe(self) -> dict[str, Any]: ...
    def extents(self) -> list[tuple[int, int, int, bool]]: ...
    def checksums(self, extent: int, /) -> bytes: ...
    def locate(self, extent: int, offset: int, /) -> tuple[str, int]: ...
    def close(self) -> None: ...

class Handle:
    def __new__(cls, *args: NoReturn) -> Handle: ...

class Scope:
    def __new__(cls, *args: NoReturn) -> Scope: ...
    def enter(self, *hook_arguments: Any) -> None: ...
    def leave(self, *hook_arguments: Any) -> None: ...
    def read(self) -> bool: ...
    def hold(self) -> None: ...

class Context(Generic[_T]):
    def __init__(
        self, enter: Callable[[], _T], leave: Callable[[], object], is_atomic: bool = False
    ) -> None: ...
    def __enter__(self) -> _T: ...
    def __exit__(self, *error: object) -> Literal[False]: ...

class Engine:
    def __new__(
        cls,
        store: Store,
        units: list[_Unit],
        params: list[_Param],
        group_count: int,
        budget: dict[str, int],
        raiser: _Raiser,
        types: tuple[type[Handle], type[Scope]],
        io: str,
        directory: bytes,
        threads: int,
        nice: int,
        io_depth: int,
        transfer_bytes: int,
        commit_every: int,
        schedule: int,
        verify: bool,
        trace_count: int,
        accept_nan: bool,
        norms: bool,
        repeats: bool,
        apart: Store | None,
        sums: bool,
        sum_leaves: int,
        device: tuple[Any, ...],
        saved: tuple[int, int, Store | None, int],
        # files: (fd, path, bytes, is direct, time of modification in ns); units: (unit, runs,
        # moves, packs, the address and the number of its checksums, which the engine completes);
        # the bytes of memory in which packed bytes stay; what owns the checksums
        in_place: tuple[
            list[tuple[int, bytes, int, bool, int]], list[tuple[Any, ...]], int, object
        ],
        # this process (0: the owner), the number of mates (0: no team), a mate's file descriptor
        team: tuple[int, int, int, int],
    ) -> Engine: ...
    def team_files(self) -> tuple[int, int]: ...
    def team_bell(self, process: int, fd: int, /) -> None: ...
    def team_on_wait(self, check: Callable[[], object], /) -> None: ...
    def team_step(self) -> int: ...
    def gather_next(self) -> tuple[int, Tensor] | None: ...
    def gather_done(self, unit: int, is_complete: bool, /) -> None: ...
    def gather_round(self, number: int, /) -> None: ...
    def gather_wait(self, waits: bool, /) -> None: ...
    def gather_parts(self, nbytes: int, /) -> list[int]: ...
    def held_bytes(self) -> int: ...
    def saved_put(self, pointer: int, nbytes: int, is_on_ssd: bool, /) -> int | None: ...
    def saved_is_taken(self, item: int, /) -> bool: ...
    def saved_room(self, nbytes: int, /) -> None: ...
    def saved_fetch(self, item: int, target: int, /) -> None: ...
    def saved_wait(self, item: int, /) -> None: ...
    def saved_lend(self, item: int, nbytes: int, /) -> Tensor: ...
    def saved_drop(self, item: int, /) -> None: ...
    def bind(
        self,
        param: int,
        tensor: Tensor,
        hollow: Tensor,
        strides: tuple[int, ...] = ...,
        order: tuple[int, ...] = ...,
        /,
    ) -> None: ...
    def classes(self, param: int, bound: type, hollow: type, /) -> None: ...
    def cast_class(self, param: int, cast: type, /) -> None: ...
    def hollow_array(self, array: Tensor, /) -> None: ...
    def callbacks(
        self,
        on_backward: Callable[[], object],
        on_gradient: Callable[[], object],
        on_forward: Callable[[bool], bool],
        in_backward: Callable[[], bool],
        /,
    ) -> None: ...
    # callback(unit, address, how often its bytes were made, and copied back, whether they are those
    # of the last copy back, pins); True: it changed them
    def on_use(
        self, callback: Callable[[int, int, int, int, bool, int], bool], moved: list[int], /
    ) -> None: ...
    # the device's kernels: bytes of lohan.fatbin; nothing where the CPU computes on its memory
    def zo_load(self, image: bytes, /) -> None: ...
    def zo_lead(
        self,
        address: int,
        count: int,
        ops: Sequence[tuple[str, bool, int, int, int, int, float, float, float]],
        # 0: values of fp32, in place; else as _core.zo_lead, with at most 64 ops without a round
        state: int = 0,
        state_format: str = "fp32",
        value_format: str = "fp32",
        first: int = 0,
        /,
    ) -> None: ...
    # speed of allocating, bytes/s; 0: at once
    def device_policy(self, no_overlap: bool, no_reuse: bool, speed: int, /) -> None: ...
    def forward(self, is_open: bool, /) -> None: ...
    def changed_take(self) -> list[int]: ...
    def scopes_drop(self) -> None: ...
    def scope(self, units: Sequence[int], /) -> Scope: ...
    def autocast(self, dtype: int, /) -> None: ...
    def pack(self, tensor: Any, /) -> Any: ...
    def unpack(self, packed: Any, /) -> Any: ...
    def gradient_hook(self, param: int, /) -> Callable[[Tensor], None]: ...
    def gradient_pull(self, param: int, parameter: Tensor, /) -> Tensor | None: ...
    def acquire(self, unit: int, /) -> None: ...
    def release(self, unit: int, /) -> None: ...
    def lend(self, param: int, /) -> Tensor: ...
    def read(self, param: int, first: int, nbytes: int, address: int, /) -> None: ...
    def begin(self, train: bool, /) -> None: ...
    def announce(self, units: Sequence[int], /) -> None: ...
    def idle_history(
        self,
        step: int,
        group: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        average_rest: float = 0.0,
        /,
    ) -> None: ...
    def idle_owed(self, units: Sequence[int], /) -> int: ...
    def idle_settle(self) -> None: ...
    def hyper(
        self,
        group: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        average_rest: float = 0.0,
        /,
    ) -> None: ...
    def sums_add(
        self,
        param: int,
        first: int,
        count: int,
        addresses: list[int],
        dtype: int,
        is_first: bool,
        /,
    ) -> None: ...
    def sums_leaf(self, number: int, /) -> None: ...
    def sums_tree(
        self,
        param: int,
        first: int,
        count: int,
        addresses: list[int],
        leaves: list[int],
        dtype: int,
        /,
    ) -> None: ...
    def sums_give(self) -> None: ...
    def given_expect(self, param: int, /) -> None: ...
    def given_put(self, param: int, first: int, count: int, address: int, /) -> None: ...
    def given(self, unit: int, /) -> None: ...
    def given_never(self) -> None: ...
    def backward_end(self) -> bool: ...
    def post_tail(self, pointer: int, nbytes: int, /) -> None: ...
    def close_step(self, scalars: bytes, /) -> None: ...
    def gradient_square_sum(self) -> float: ...
    def gradient_square_sums(self) -> bytes: ...
    def gradient_scale(self, scale: float, /) -> None: ...
    def repeat(self) -> None: ...
    def repeat_wait(self, waits: bool, /) -> None: ...
    def commit_every(self, steps: int, /) -> bool: ...
    def abort(self) -> None: ...
    def await_steps(self) -> None: ...
    def flush(self, commit: bool, /) -> None: ...
    def commit_hold(self) -> None: ...
    def commit_release(self) -> None: ...
    def pause(self, units: list[int], commit: bool, /) -> None: ...
    def param_steps(self, clear: bool, /) -> list[int]: ...
    def resume(self, changed_units: list[int], /) -> None: ...
    def stats(self) -> dict[str, int] | None: ...
    def trace(self) -> list[tuple[int, int, int, int, int, int, int]]: ...
    def status(self) -> dict[str, Any]: ...
    def check(self) -> None: ...
    def is_forked(self) -> bool: ...
    def close(self) -> None: ...

def store_create(
    type: type[Store],
    raiser: _Raiser,
    directories: Sequence[str],
    weights: list[int],
    extents: list[tuple[int, int]],
    groups: list[int],
    meta: bytes,
    scalar_bytes_max: int,
    single_slot: bool,
    temporary: bool,
    allow_buffered: bool,
    allow_tmpfs: bool,
) -> Store: ...
def store_open(
    type: type[Store],
    raiser: _Raiser,
    directories: Sequence[str],
    read_only: bool,
    allow_buffered: bool,
    is_held: bool = False,
    open_at: int | None = None,
) -> Store: ...
def store_measure(raiser: _Raiser, directory: str, probe_bytes: int, /) -> tuple[int, int]: ...
def budget(
    units: list[tuple[_Unit, int, int, int]],
    host_bytes: int,
    bookkeeping_bytes: int,
    is_waiting: bool,
    waits_in_memory: bool,
    is_summed: bool,
    block_bytes_per_element: int,
    waits_at_will: bool,
    raiser: _Raiser,
    /,
) -> dict[str, int]: ...
def simulate(
    # dtype, always, elements (frozen: bytes)[, descriptions of packed parameters, bytes of memory
    # traffic in whose time an update does its other work, whether the rule is that of others=]
    units: Sequence[tuple[Any, ...]],
    # (units, parts[, room for saved tensors]); a part: (forward_ns, backward_ns, saved)
    blocks: Sequence[tuple[Any, ...]],
    machine: dict[str, int],
    saved: dict[str, int],
    host_bytes: int,
    schedule: int,
    commit_every: int,
    io_depth: int,
    transfer_bytes: int,
    only_checks: bool,
    raiser: _Raiser,
    trace_count: int = 0,
    cluster: dict[str, int | str | bool] = ...,
    states: str = "fp32",
    micro_steps: int = 0,
    visits: int = 1,
    rule: str | None = None,
    others: str | None = None,
) -> dict[str, Any]: ...
def scalars_make(param_steps: Sequence[int], caller: bytes, /) -> bytes: ...
def scalar_overhead_bytes(param_count: int, /) -> int: ...
def exit_fails() -> bool: ...
def heap_keep() -> bool: ...
def adam_update(
    kernel: str | None,
    param_ptr: int,
    residual_ptr: int,
    moment1_ptr: int,
    moment2_ptr: int,
    gradient_ptr: int,
    count: int,
    param_dtype: _Dtype,
    gradient_dtype: _Dtype,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    gradient_scale: float,
    threads: int = 1,
    checksums: bool = False,
    expected: bytes | None = None,
    states: _States = "fp32",
    scales_ptr: int = 0,
    rule: str = "adamw",
) -> bytes | None: ...
def rules() -> tuple[tuple[str, bool, bool, bool, bool], ...]: ...

# The stored moments of whole blocks of 64 elements, then the same in fp32.
def adam_decode(
    states: str,
    moment1_ptr: int,
    moment2_ptr: int,
    scales_ptr: int,
    m: int,
    v: int,
    count: int,
    /,
) -> None: ...
def adam_encode(
    states: str,
    moment1_ptr: int,
    moment2_ptr: int,
    scales_ptr: int,
    m: int,
    v: int,
    first: int,
    count: int,
    param: int,
    step: int,
    /,
) -> None: ...
def stream_bound(
    param_ptr: int,
    residual_ptr: int,
    moment1_ptr: int,
    moment2_ptr: int,
    gradient_ptr: int,
    count: int,
    param_dtype: _Dtype,
    gradient_dtype: _Dtype,
    threads: int = 1,
    states: str = "fp32",
) -> None: ...
def adam_split(master: int, param: int, residual: int, count: int, /) -> None: ...
def adam_join(param: int, residual: int, master: int, count: int, /) -> None: ...
def zo_kernels() -> tuple[str, ...]: ...
def zo_apply(
    values_ptr: int,
    source_ptr: int,
    first: int,
    count: int,
    ops: Sequence[tuple[str, bool, int, int, int, int, float, float, float]],
    kernel: str | None = None,
    format: str | None = None,  # of rounds
) -> None: ...

# formats: "fp32", "bf16", "fp16", "fp8"; that of rounds is the state's
def zo_lead(
    state_ptr: int,
    state_format: str,
    values_ptr: int,
    value_format: str,
    first: int,
    count: int,
    ops: Sequence[tuple[str, bool, int, int, int, int, float, float, float]],
    kernel: str | None = None,
) -> None: ...
def sequence_peek() -> int: ...
def sequence_raise(least: int, /) -> None: ...
def unpack(
    unpack: tuple[Any, ...],
    first: int,
    count: int,
    packed: int,
    scales: int,
    table: int,
    nested: int,
    nested_table: int,
    zeros: int,
    index: int,
    out: int,
    /,
) -> None: ...
def crc32c(buffer: bytes | bytearray | memoryview, value: int = 0) -> int: ...
def partial_add(
    sums: int,
    stride: int,
    first: int,
    leaves: list[int],
    next_: int,
    gradient: int,
    dtype: int,
    count: int,
    /,
) -> list[int]: ...
def partial_tree(sum_: int, addresses: list[int], leaves: list[int], count: int, /) -> None: ...
def crc32c_copy(to: int, from_: int, nbytes: int, value: int, /) -> int: ...
def plan(model: dict[str, Any], machine: dict[str, Any], policy: str, /) -> dict[str, Any]: ...
def plan_step(
    model: dict[str, Any],
    machine: dict[str, Any],
    /,
    fates: list[str],
    blocks: list[dict[str, bool]] | None = None,
    schedule: str = "optimized",
    master_bytes: int | None = None,
    must_fit: bool = True,
) -> dict[str, Any]: ...
def plan_policies() -> list[str]: ...
def build_info() -> dict[str, Any]: ...
def probe_io(backend: str, directory: str | bytes, direct: bool, /) -> tuple[int, str]: ...
def probe_memory(nbytes: int, lock: bool, /) -> tuple[str, bool, str]: ...
def probe_pins(device_index: int, nbytes: int, /) -> int: ...
