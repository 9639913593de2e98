"""gpu.sh asserts: what lohan assumes about torch and the driver, one assumption per case."""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu_part import GIB, MIB, ROOT, Part, store_folder

sys.path.insert(0, str(ROOT / "tests" / "cuda"))

WIDTH = 64
ROWS = 4
PINNED_BYTES = (1 * GIB, 4 * GIB, 16 * GIB)
DRY_PINNED_BYTES = (1 * MIB, 2 * MIB)
ROUNDS = 200
# DLDeviceType of DLPack.
DL_CPU, DL_CUDA = 1, 2


class _Version(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]


class _Exchange(ctypes.Structure):
    """The struct lhpy_dl_exchange of csrc/py/dlpack_abi.h."""

    _fields_ = [
        ("version", _Version),
        ("previous", ctypes.c_void_p),
        ("managed_tensor_allocator", ctypes.c_void_p),
        ("managed_from_object", ctypes.c_void_p),
        ("managed_to_object", ctypes.c_void_p),
        ("tensor_from_object", ctypes.c_void_p),
        (
            "current_work_stream",
            ctypes.CFUNCTYPE(
                ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
            ),
        ),
    ]


def exchange() -> _Exchange:
    """Return torch's DLPack exchange table."""
    import torch

    capsule: Any = torch.Tensor.__dlpack_c_exchange_api__  # type: ignore[attr-defined]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.cast(pointer(capsule, b"dlpack_exchange_api"), ctypes.POINTER(_Exchange)).contents


class Asserts:
    """The cases."""

    def __init__(self, part: Part) -> None:
        import torch

        self.part, self.place, self.torch = part, part.place, torch
        self.table = exchange()

    def stream_said(self) -> int:
        """Return the current stream of this thread according to torch's table."""
        kind = self.place.pick(DL_CUDA, DL_CPU)
        stream = ctypes.c_void_p()
        code = self.table.current_work_stream(kind, 0, ctypes.byref(stream))
        assert code == 0, f"current_work_stream returned {code}"
        return stream.value or 0

    def stream_is(self) -> int:
        """Return the current stream of this thread according to torch.cuda."""
        return 0 if self.place.is_dry else int(self.torch.cuda.current_stream().cuda_stream)

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Return a context in which computation does not run on the default stream."""
        if self.place.is_dry:
            yield
            return
        stream = self.torch.cuda.Stream()
        stream.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(stream):
            yield
        self.torch.cuda.current_stream().wait_stream(stream)

    def streams(self) -> Mapping[str, Any]:
        """The table returns the current stream, also in hooks on autograd's threads."""
        torch = self.torch
        found: dict[str, list[int]] = {}

        def look(name: str) -> None:
            found[name] = [self.stream_said(), self.stream_is()]

        def backward(name: str) -> None:
            layer = torch.nn.Linear(WIDTH, WIDTH).to(self.place.device)
            layer.weight.register_post_accumulate_grad_hook(lambda p: look(name))
            layer(torch.ones(ROWS, WIDTH, device=self.place.device)).sum().backward()

        look("default")
        backward("hook_default")
        with self.side_stream():
            look("side")
            expected = self.stream_is()
            backward("hook_side")
        for name, (said, is_) in found.items():
            assert said == is_, f"{name}: the table has {said:#x}, torch {is_:#x}"
        assert found["hook_side"][0] == expected, "autograd's thread computes on another stream"
        assert self.place.is_dry or expected != found["default"][0]
        return {"streams": found, "table_version": self.table.version.major}

    def data_across_devices(self) -> Mapping[str, Any]:
        """A parameter's data can be switched from main memory to the device and back."""
        torch = self.torch
        param = torch.nn.Parameter(torch.zeros(ROWS, WIDTH))
        host = param.data
        param.data = torch.ones(ROWS, WIDTH, device=self.place.device)
        assert param.device.type == self.place.device.type and bool((param == 1).all())
        (param * 2).sum().backward()
        assert param.grad is not None and param.grad.device.type == self.place.device.type
        param.grad = None
        param.data = host
        assert param.device.type == "cpu" and bool((param == 0).all())
        return {"holds": True}

    def lends(self) -> Mapping[str, Any]:
        """In a forward, parameters are on the device with the right bits; lend() returns them."""
        torch, place = self.torch, self.place
        import lohan
        from lohan.common._inside import inside

        seen: list[Any] = []
        with store_folder() as folder:
            layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
            model = torch.nn.Sequential(*layers)
            expected = [layer.weight.detach().clone() for layer in layers]
            for layer in layers:
                layer.register_forward_hook(
                    lambda m, a, o: seen.append((m.weight.device, m.weight.detach().cpu().clone()))
                )
            model = lohan.wrap(
                model, store=folder / "store", device=place.lohan, allow_tmpfs=True, lr=0.0
            )
            try:
                model(torch.ones(ROWS, WIDTH, device=place.device)).sum().backward()
                model.optimizer.step()
                for (device, value), weight in zip(seen, expected, strict=True):
                    assert device.type == place.device.type, f"a weight is on {device}"
                    assert torch.equal(value, weight), "a weight has different bits on the device"
                lend = inside(model).parameters.lend(0)
                assert lend.device.type == place.device.type
                assert torch.equal(lend.cpu(), expected[0])
                del lend
                status = model.lohan.status()
            finally:
                model.lohan.close()
        return {"weights": len(seen), "status": {k: str(v) for k, v in status.items()}}

    def hollow(self) -> Mapping[str, Any]:
        """A hollow parameter reports its device, and cannot be read."""
        torch, place = self.torch, self.place
        import lohan
        from lohan.errors import HollowParameterError

        with store_folder() as folder:
            layer = torch.nn.Linear(WIDTH, WIDTH)
            model = torch.nn.Sequential(layer, torch.nn.Linear(WIDTH, WIDTH))
            model = lohan.wrap(model, store=folder / "store", device=place.lohan, allow_tmpfs=True)
            try:
                weight = layer._parameters["weight"]
                assert weight is not None
                assert weight.device.type == place.device.type, f"it is on {weight.device}"
                assert weight.shape == (WIDTH, WIDTH)
                refused = ""
                try:
                    weight.sum().item()
                except HollowParameterError as error:
                    refused = str(error)
                assert refused, "a hollow parameter was read"
            finally:
                model.lohan.close()
        return {"refused": refused[:200]}

    def pinning(self) -> Mapping[str, Any]:
        """Torch treats memory that csrc/dev registers as pinned; measures the time to register."""
        torch, place = self.torch, self.place
        from shim_helper import Shim, build

        with tempfile.TemporaryDirectory() as folder:
            shim = Shim(build(Path(folder)))
            try:
                shim.open("emu" if place.is_dry else "cuda", 0)
                for nbytes in place.pick(PINNED_BYTES, DRY_PINNED_BYTES):
                    host = torch.zeros(nbytes, dtype=torch.uint8)
                    before = not place.is_dry and host.is_pinned()
                    begin = time.perf_counter()
                    shim.register(host)
                    seconds = time.perf_counter() - begin
                    pinned = place.is_dry or host.is_pinned()
                    shim.unregister(host)
                    self.part.say(nbytes=nbytes, register_ms=1e3 * seconds, is_pinned=pinned)
                    assert not before and pinned, f"{nbytes} registered bytes are not pinned"
                    del host
            finally:
                shim.close()
        return {"holds": True}

    def events(self) -> Mapping[str, Any]:
        """Measure the host's time to record an event, to wait for it and to query it."""
        place = self.place
        if place.is_dry:
            return {"record_us": 0.0, "wait_us": 0.0, "query_us": 0.0}
        torch = self.torch
        event, stream = torch.cuda.Event(), torch.cuda.Stream()
        costs = {"record": event.record, "wait": lambda: stream.wait_event(event)}
        costs["query"] = event.query
        found = {}
        for name, call in costs.items():
            times = []
            for _ in range(ROUNDS):
                begin = time.perf_counter()
                call()
                times.append(time.perf_counter() - begin)
            found[f"{name}_us"] = 1e6 * statistics.median(times)
        return found

    def wrong_device(self) -> Mapping[str, Any]:
        """A batch on the wrong device is rejected with an error that names it."""
        torch, place = self.torch, self.place
        import lohan
        from lohan.errors import DeviceMismatchError

        away = "meta" if place.is_dry else "cpu"
        said = []
        for name, device in ((place.lohan, away), (None, place.pick("cuda", "meta"))):
            with store_folder() as folder:
                model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH))
                model = lohan.wrap(model, store=folder / "store", device=name, allow_tmpfs=True)
                try:
                    model(torch.ones(ROWS, WIDTH, device=device))
                except DeviceMismatchError as error:
                    said.append(str(error))
                finally:
                    model.lohan.close()
        assert len(said) == 2, f"a batch on the wrong device was accepted: {said}"
        return {"said": said}

    def oom(self) -> Mapping[str, Any]:
        """The step after a forward that ran out of memory succeeds."""
        torch, place = self.torch, self.place
        import lohan

        with store_folder() as folder:
            model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))

            def hook(module: Any, args: Any) -> None:
                if args[0].shape[0] > ROWS:
                    if place.is_dry:
                        raise torch.OutOfMemoryError("simulated")
                    torch.empty(1 << 60, dtype=torch.uint8, device=place.device)

            model[2].register_forward_pre_hook(hook)
            model = lohan.wrap(model, store=folder / "store", device=place.lohan, allow_tmpfs=True)
            try:
                died = ""
                try:
                    model(torch.ones(2 * ROWS, WIDTH, device=place.device))
                except torch.OutOfMemoryError as error:
                    died = str(error)
                assert died
                model(torch.ones(ROWS, WIDTH, device=place.device)).sum().backward()
                model.optimizer.step()
                model.lohan.flush()
                assert model.lohan.step == 1
            finally:
                model.lohan.close()
        return {"died": died[:120]}


def run(part: Part) -> None:
    """Run all cases."""
    asserts = Asserts(part)
    part.run(
        {
            "streams": asserts.streams,
            "data_across_devices": asserts.data_across_devices,
            "lends": asserts.lends,
            "hollow": asserts.hollow,
            "pinning": asserts.pinning,
            "events": asserts.events,
            "wrong_device": asserts.wrong_device,
            "oom": asserts.oom,
        }
    )
