"""The late device in Python: builds it, loads it before torch, and completes torch.cuda.

late.h explains the device. `load()` makes this process one that seems to have a GPU: torch's device
"cuda" exists, and what lohan uses of torch.cuda works. It must be called before the first import of
torch, and cannot be undone.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import pathlib
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import cbuild  # noqa: E402  (its folder has just been named)

FOLDER = cbuild.BUILD / "lag"
SOURCES = ("device.cpp", "ops.cpp")
# Not optimized: most of the build's time is torch's headers, and most of a run's is CPU kernels.
CPP_FLAGS = ["-std=c++20", "-O0", "-g1", "-Wall", "-Wextra", "-Werror", "-fPIC"]
# enum fake_cuda_order
ORDERS = ("any", "copies last", "copies first")


class Missing(Exception):
    """The device cannot be built or loaded here; the text is the reason."""


def torch_folder() -> pathlib.Path:
    """Return torch's folder without importing torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise Missing("no torch")
    return pathlib.Path(found.origin).parent


def _compile(command: list[str]) -> None:
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode != 0:
        raise Missing(f"{command[0]} failed: {answer.stderr[-2000:]}")


def build() -> pathlib.Path:
    """Build the device, unless it is there; return the folder of libcuda.so.1 and liblate.so.

    Raises:
        Missing: there is no compiler, or no header.
    """
    torch = torch_folder()
    compiler = shutil.which("g++")
    if compiler is None:
        raise Missing("no g++")
    if not (torch / "include" / "torch" / "library.h").exists():
        raise Missing("torch has no headers")
    if (torch / "lib" / "libtorch_cuda.so").exists():
        raise Missing("torch is built for CUDA: it has kernels of its own for this device type")
    inputs = [*sorted(HERE.glob("*.[ch]*")), *sorted((ROOT / "tests" / "c").glob("fake_cuda*"))]
    inputs += [ROOT / "tests" / "py" / "fake_driver.c", ROOT / "csrc" / "dev" / "cuda_abi.h"]
    version = importlib.metadata.version("torch")
    digest = hashlib.sha256(repr([version, torch, CPP_FLAGS]).encode())
    for path in inputs:
        digest.update(path.read_bytes())
    folder = FOLDER / digest.hexdigest()[:16]
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "liblate.so").exists():
            for old in FOLDER.glob("*/"):
                shutil.rmtree(old)
            folder.mkdir()
            _build_into(folder, torch, compiler)
    return folder


def _build_into(folder: pathlib.Path, torch: pathlib.Path, compiler: str) -> None:
    include = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'c'}"]
    driver = folder / "libcuda.so.1"
    flags = [*cbuild.LANGUAGE_FLAGS, *cbuild.NUMERIC_FLAGS, "-O1", "-shared", *include]
    words = [*flags, str(HERE / "driver.c"), "-lm", "-Wl,-soname,libcuda.so.1", "-o", str(driver)]
    _compile([*cbuild.compiler(), *words])
    objects, running = [], []
    for name in SOURCES:
        made = folder / f"{name}.o"
        words = [*CPP_FLAGS, *include, "-isystem", str(torch / "include"), "-c", str(HERE / name)]
        running.append(
            subprocess.Popen([compiler, *words, "-o", str(made)], stderr=subprocess.PIPE, text=True)
        )
        objects.append(str(made))
    for process in running:
        _, said = process.communicate()
        if process.returncode != 0:
            raise Missing(f"g++ failed: {said[-2000:]}")
    temporary = folder / "liblate.new"
    library = torch / "lib"
    words = ["-shared", *objects, str(driver), f"-L{library}", "-ltorch_cpu", "-lc10", "-ldl"]
    words += [f"-Wl,-rpath,{library}", "-Wl,-rpath,$ORIGIN", "-o", str(temporary)]
    _compile([compiler, *words])
    temporary.rename(folder / "liblate.so")


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of the whole process."""

    enqueued: int  # operations
    executed: int
    waits: int
    live_bytes: int  # of the device's memory


class Late:
    """The device of this process.

    Attributes:
        is_integrated: whether it says that its memory is main memory.
    """

    is_integrated = False

    def __init__(self, folder: pathlib.Path) -> None:
        self.driver = ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(folder / "liblate.so"))
        self.library.late_stream_handle.restype = ctypes.c_void_p
        self.library.late_trim.restype = ctypes.c_bool
        self.driver.driver_live_count.restype = ctypes.c_uint64
        self.driver.driver_pageable_count.restype = ctypes.c_uint64
        self.library.late_open()
        self.waits: collections.Counter[str] = collections.Counter()
        self._report = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._waits)
        self.library.late_hook(self._report)
        atexit.register(self.library.late_end)

    def _waits(self, reason: bytes) -> None:
        """Count a wait of the host by its reason and the place that caused it."""
        frame = sys._getframe().f_back
        while frame is not None and not _is_place(frame.f_code.co_filename):
            frame = frame.f_back
        place = "autograd"
        if frame is not None:
            path = pathlib.Path(frame.f_code.co_filename)
            place = f"{path.name}:{frame.f_code.co_name}"
        self.waits[f"{reason.decode()} in {place}"] += 1

    def tune(
        self, order: str = "any", delay_us: int = 0, seed: int = 0, piece_bytes: int = 0
    ) -> None:
        """Set how streams proceed: see driver_tune() in driver.h."""
        size, number = ctypes.c_size_t(piece_bytes), ctypes.c_uint64(seed)
        delay = ctypes.c_uint64(delay_us * 1000)
        self.driver.driver_tune(ctypes.c_int(ORDERS.index(order)), size, delay, number)

    def slow(self, item_us: int = 0, bytes_per_s: int = 0) -> None:
        """Set how slowly the device computes and copies: see driver_slow() in driver.h."""
        self.driver.driver_slow(ctypes.c_uint64(item_us * 1000), ctypes.c_uint64(bytes_per_s))

    def allow(self, count: int) -> None:
        """Let streams that compute execute count more items; -1: any number."""
        self.driver.driver_allow(ctypes.c_int64(count))

    @contextlib.contextmanager
    def held(self, stream: int) -> Iterator[None]:
        """Hold a stream at this place of its work; it continues when the block ends."""
        self.library.late_hold(stream)
        try:
            yield
        finally:
            self.library.late_release()

    def drain(self) -> None:
        """Wait until everything that was enqueued is executed, without counting it as a wait."""
        self.driver.driver_drain()

    def limit_registered(self, bytes_max: int) -> None:
        """Let at most this many bytes of main memory be registered; 0: no limit; 1: none."""
        self.driver.driver_register_limit(ctypes.c_uint64(bytes_max))

    @property
    def pageable_count(self) -> int:
        """Return the number of asynchronous copies so far of memory that was not registered."""
        return int(self.driver.driver_pageable_count())

    @property
    def counts(self) -> Counts:
        numbers = (ctypes.c_int64 * 4)()
        self.library.late_counts(numbers)
        return Counts(*numbers)

    @property
    def live_count(self) -> int:
        """Return the driver's count of contexts, streams, events and registered regions."""
        return int(self.driver.driver_live_count())

    def trim(self) -> bool:
        """Return free memory; False if tensors are alive."""
        return bool(self.library.late_trim())

    @contextlib.contextmanager
    def counted(self) -> Iterator[collections.Counter[str]]:
        """Count the waits of a block."""
        before = self.waits.copy()
        found: collections.Counter[str] = collections.Counter()
        yield found
        found.update(self.waits - before)


def _is_place(path: str) -> bool:
    """Return whether a wait is attributed to a file: not torch's, and not this one."""
    return "/torch/" not in path and path != __file__ and "contextlib" not in path


class Stream:
    """torch.cuda.Stream on the late device."""

    def __init__(self, number: int | None = None, **_: Any) -> None:
        library = device().library
        self.number = library.late_stream_make() if number is None else number
        self.cuda_stream = library.late_stream_handle(self.number) or 0
        self._before: list[int] = []

    @property
    def device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def wait_stream(self, other: Stream) -> None:
        device().library.late_stream_order(self.number, other.number)

    def synchronize(self) -> None:
        device().library.late_stream_wait(self.number)

    def __enter__(self) -> Stream:
        self._before.append(device().library.late_stream_set(self.number))
        return self

    def __exit__(self, *args: object) -> None:
        device().library.late_stream_set(self._before.pop())


def current_stream(_: Any = None) -> Stream:
    """Return this thread's current stream."""
    library = device().library
    number = library.late_stream_set(0)
    library.late_stream_set(number)
    return Stream(number)


class Generator:
    """The device's default generator."""

    def get_state(self) -> Any:
        import torch

        state = torch.empty(2, dtype=torch.int64)
        device().library.late_random_get(ctypes.c_void_p(state.data_ptr()))
        return state.view(torch.uint8)

    def set_state(self, state: Any) -> None:
        device().library.late_random_set(ctypes.c_void_p(state.contiguous().data_ptr()))

    def manual_seed(self, seed: int) -> None:
        words = (ctypes.c_uint64 * 2)(seed, 0)
        device().library.late_random_set(words)


_device: Late | None = None


def device() -> Late:
    """Return the device that `load()` made, or that was installed."""
    assert _device is not None, "late.load() has not been called"
    return _device


def install(made: Any) -> None:
    """Let `device()` return another device (real.py)."""
    global _device
    _device = made


def load() -> Late:
    """Make the late device this process's GPU.

    Raises:
        Missing: it cannot be built or loaded here.
    """
    global _device
    if _device is not None:
        return _device
    if "torch" in sys.modules:
        raise Missing("torch was imported before the late device")
    folder = build()
    # torch's own order of loading; see torch/__init__.py.
    ctypes.CDLL(str(torch_folder() / "lib" / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    _device = Late(folder)
    _complete()
    return _device


def _complete() -> None:
    """Give torch.cuda what a torch without CUDA lacks."""
    import torch

    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda._initialized = True
    cuda.is_available = lambda: True
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.device_count = cuda.random.device_count = lambda: 1
    cuda.current_device = cuda.random.current_device = lambda: 0
    cuda._exchange_device = cuda._maybe_exchange_device = lambda index: 0
    cuda.current_stream = current_stream
    cuda.Stream = Stream
    cuda.stream = lambda stream: stream
    cuda.synchronize = lambda *_: device().library.late_device_wait()
    cuda.default_generators = (Generator(),)
    cuda.mem_get_info = lambda *_: (1 << 30, 8 << 30)
    cuda.memory_reserved = cuda.max_memory_allocated = lambda *_: device().counts.live_bytes
    cuda.memory_allocated = cuda.memory_reserved
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(
        is_integrated=device().is_integrated
    )
    cuda.get_device_capability = lambda *_: (7, 5)
    cuda.get_device_name = lambda *_: "late"
    torch.amp.autocast_mode.torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    _complete_exchange(torch)


def _complete_exchange(torch: Any) -> None:
    """Put the device's current stream into DLPack's table of functions."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    make = ctypes.pythonapi.PyCapsule_New
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    name = b"dlpack_exchange_api"
    size, last = 56, 6  # of the table in bytes, and its last entry: current_work_stream
    table = (ctypes.c_void_p * (size // 8))()
    ctypes.memmove(table, pointer(torch.Tensor.__dlpack_c_exchange_api__, name), size)
    table[last] = ctypes.cast(device().library.late_current_work_stream, ctypes.c_void_p)
    _kept.append((table, name))
    torch.Tensor.__dlpack_c_exchange_api__ = make(ctypes.addressof(table), name, None)


_kept: list[Any] = []
