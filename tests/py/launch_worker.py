"""One process with the driver tests/py/fake_driver.c: kernels advance units in device memory.

Run it as `python launch_worker.py STORE`. torch has no such GPU, so no model runs: units are
acquired, advanced and released as by a session, and read in the device's memory, which is a tensor.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import pathlib
import sys
from typing import Any

import lohan
import torch
from lohan import _core
from lohan.common._inside import inside
from lohan.torch_glue import _device
from torch import nn

WIDTH = 64
DEPTH = 6
ROUNDS = 12


class Led:
    """Advances each unit by one position each time, as a session's on_use does."""

    def __init__(self, session: Any) -> None:
        self.engine = session.engine
        self.units = session.layout.units
        self.left: dict[int, list[int]] = {}  # makes, outs, position, position in main memory
        self.seen: list[tuple[int, int, int]] = []

    def ops(self, unit: int, begin: int, end: int) -> list[Any]:
        stream = (7, 0, unit)
        return [("perturb", False, *stream, at, 0.5, 0.0, 0.0) for at in range(begin, end)]

    def on_use(
        self, unit: int, address: int, makes: int, outs: int, is_from_write_back: bool, pins: int
    ) -> bool:
        left = self.left.setdefault(unit, [-1, 0, 0, 0])
        if left[1] != outs:
            left[1], left[3] = outs, left[2]
        if left[0] != makes:
            left[0], left[2] = makes, left[3] if is_from_write_back else 0
        self.seen.append((unit, left[2], address))
        param = self.units[unit].params[0]
        self.engine.zo_lead(
            address + param.first, param.count, self.ops(unit, left[2], left[2] + 1)
        )
        left[2] += 1
        return True


def kept_lead(engine: Any, driver: Any) -> None:
    """An fp8 parameter takes two launches, because it has more operations than fit one."""
    state = (torch.randn(1000) * 0.1).to(torch.float8_e4m3fn)
    values = torch.zeros(1000, dtype=torch.bfloat16)
    ops: list[Any] = []
    for step in range(30):
        ops += [("update", False, 7, 0, 1, step, 3.0, 1e-2, 0.0)] * 2
        ops += [("round", False, 7, 65535, 1, step, 0.0, 0.0, 0.0)]
    ops += [("perturb", False, 7, 0, 1, 30, 1e-2, 0.0, 0.0)]
    led, read = state.clone(), values.clone()
    engine.zo_lead(read.data_ptr(), 1000, ops, led.data_ptr(), "fp8", "bf16")
    driver.driver_drain()
    _core.zo_lead(state.data_ptr(), "fp8", values.data_ptr(), "bf16", 0, 1000, ops)
    is_same = torch.equal(led.float(), state.float()) and torch.equal(read, values)
    print(f"kept: {'same' if is_same else 'other'}")


def main(store: str) -> None:
    """Run all launches; the top of the file describes them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    before = [p.detach().clone() for p in model.parameters()]
    memory: list[torch.Tensor] = []

    emulated = _device.Device.options

    def allocate(self: _device.Device) -> torch.Tensor:
        memory.append(torch.zeros(self.slot_bytes, dtype=torch.uint8))
        return memory[0]

    def options(self: _device.Device, buffer_bytes: int) -> tuple[Any, ...]:
        return emulated(dataclasses.replace(self, name="cuda"), buffer_bytes)

    _device.Device._allocate = allocate  # type: ignore[method-assign]
    _device.Device.options = options  # type: ignore[method-assign]
    block = WIDTH * WIDTH * 4
    model = lohan.wrap(
        model, method="mezo", store=store, device="emu", device_param_bytes=3 * block, seed=7
    )
    session: Any = inside(model)
    engine = session.engine
    led = Led(session)
    engine.on_use(led.on_use, [])
    try:
        engine.zo_lead(memory[0].data_ptr(), 1, [])
    except ValueError:
        print("refused without kernels")
    try:
        engine.zo_load(b"no image")
    except lohan.LohanError as error:
        print(f"refused: {error}")
    engine.zo_load(b"kernels of cuda/")
    for _ in range(ROUNDS):
        engine.begin(False)
        for unit in range(DEPTH):
            engine.acquire(unit)
            engine.release(unit)
    driver = ctypes.CDLL("libcuda.so.1")
    for unit in range(DEPTH):
        engine.acquire(unit)
        driver.driver_drain()
        _, position, address = led.seen[-1]
        param = led.units[unit].params[0]
        raw = (ctypes.c_float * param.count).from_address(address + param.first)
        expected = before[unit].flatten().clone()
        at = expected.data_ptr()
        _core.zo_apply(at, at, 0, param.count, led.ops(unit, 0, position + 1))
        is_same = torch.equal(torch.frombuffer(raw, dtype=torch.float32), expected)
        print(f"unit {unit} at {position}: {'same' if is_same else 'other'}")
        engine.release(unit)
    kept_lead(engine, driver)
    engine.acquire(0)  # this is launched when the session ends
    engine.release(0)
    session.close()
    del engine, led, session, model
    gc.collect()
    print(f"alive: {driver.driver_live_count()}")


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    main(sys.argv[1])
