"""Zeroth-order training on a device whose memory the CPU does not compute on.

No GPU is needed: the emulated device represents one, for which a session advances parameters by the
engine's calls and copies what it writes, as on a GPU. In addition, a process whose driver is made
of threads launches kernels.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import lohan
import mezo_helper as helper
import pytest
import torch
from lohan import _core
from lohan.common._inside import inside
from lohan.errors import ModelError, UnsupportedError
from lohan.layout._block import Param
from lohan.mezo import _zo_device, _zo_method
from mezo_helper import EPS, LR, SEED, Settings, differing, plain_run, steps
from patience import HUNG_S
from test_mezo_storage import PlainKept, bf16
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import cbuild  # noqa: E402  (its folder has just been named)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated device is led by launches; whatever the CPU would do to it itself fails."""

    def refuse(*args: Any) -> None:
        raise AssertionError(f"the CPU touches the device's memory: {args}")

    monkeypatch.setattr(_zo_device, "is_launched", lambda device: device.name == "emu")
    monkeypatch.setattr(_zo_method, "_apply", refuse)
    monkeypatch.setattr(_zo_method, "ctypes", types.SimpleNamespace(memmove=refuse))


def wrapped(make: Callable[[], nn.Module], store: pathlib.Path, **settings: Any) -> Any:
    model = make()
    total = sum(p.nbytes for p in model.parameters())
    largest = max(p.nbytes for p in model.parameters())
    slots = min(total, 4 * largest)
    return lohan.wrap(
        model,
        store=store,
        method="mezo",
        lr=LR,
        eps=EPS,
        seed=SEED,
        device="emu",
        device_param_bytes=slots,
        **settings,
    )


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("runs", ["together", "apart"])
@pytest.mark.parametrize("make", [helper.opt, helper.opt_untied, helper.gpt2])
def test_what_is_launched_is_mezo_in_memory(
    make: Callable[[], nn.Module], runs: str, store_dir: pathlib.Path
) -> None:
    data = helper.batches(3)
    losses, values = plain_run(make, 3, Settings())
    model = wrapped(make, store_dir, runs=runs)
    assert steps(model, data) == losses
    assert differing(model, values) == []
    assert inside(model).runs.kept == {}
    model.lohan.close()


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(("make", "storage"), [(helper.opt, "bf16"), (bf16, "bf16"), (bf16, "fp8")])
def test_what_is_launched_is_what_kept_ones_give_in_memory(
    make: Callable[[], nn.Module], storage: str, store_dir: pathlib.Path
) -> None:
    data = helper.batches(5)
    losses, values = PlainKept(make(), storage, samples=2).run(data)
    model = wrapped(make, store_dir, storage=storage, write_every=2, num_samples=2)
    assert steps(model, data) == losses
    assert differing(model, values) == []
    model.lohan.close()
    model = wrapped(make, store_dir, resume=True)
    assert inside(model).method.run.base == 4
    assert differing(model, values) == []
    model.lohan.close()


@pytest.mark.usefixtures("launched")
def test_what_is_written_comes_from_copies(store_dir: pathlib.Path) -> None:
    data = helper.batches(4)
    _, values = plain_run(helper.opt, 4, Settings())
    model = wrapped(helper.opt, store_dir, write_every=2)
    session = inside(model)
    places: list[int] = []
    write = session.method._copy_back

    def copied(unit: int) -> torch.Tensor:
        copy = write(unit)
        places.append(copy.data_ptr())
        assert copy.data_ptr() != session.runs.where[unit].address
        return copy

    session.method._copy_back = copied
    steps(model, data)
    assert len(places) == 2 * len(session.runs.where)
    session.close()
    model = wrapped(helper.opt, store_dir, resume=True)
    assert inside(model).method.run.base == 4
    assert differing(model, values) == []
    model.lohan.close()


@pytest.mark.usefixtures("launched")
def test_a_launch_that_fails_leaves_the_step_undone(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = helper.batches(3)
    losses, values = plain_run(helper.opt, 3, Settings())
    model = wrapped(helper.opt, store_dir)
    session = inside(model)
    assert steps(model, data[:1]) == losses[:1]
    engine, calls = session.engine, []

    class Failing:
        """An engine whose fifth lead fails half-way."""

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        def zo_lead(self, address: int, count: int, *rest: Any) -> None:
            calls.append(address)
            if len(calls) == 5:
                engine.zo_lead(address, count // 2, *rest)
                raise OSError("cuLaunchKernel")
            engine.zo_lead(address, count, *rest)

    session.engine = Failing()
    with pytest.raises(OSError, match="cuLaunchKernel"):
        steps(model, data[1:2])
    session.engine = engine
    assert steps(model, data[1:]) == losses[1:]
    assert differing(model, values) == []
    model.lohan.close()


def test_a_lead_is_checked_before_it_is_made(store_dir: pathlib.Path) -> None:
    model = wrapped(helper.opt, store_dir)
    engine = inside(model).engine
    with pytest.raises(ValueError, match="2\\^50"):
        engine.zo_lead(0, 2**50 + 1, [])
    with pytest.raises(ValueError, match="2\\^50"):
        engine.zo_lead(0, 2, [], 0, "fp32", "fp32", 2**50 - 1)
    with pytest.raises(ValueError, match="first op"):
        engine.zo_lead(0, 0, [("draw", True, 0, 0, 0, 0, 0.0, 0.0, 0.0)])
    with pytest.raises(ValueError, match="no state"):
        engine.zo_lead(0, 0, [], 0, "fp32", "bf16")
    with pytest.raises(ValueError, match="value_format is 'fp8'"):
        engine.zo_lead(0, 0, [], 4096, "fp8", "fp8")
    perturb = ("perturb", False, 0, 0, 0, 0, 0.0, 0.0, 0.0)
    with pytest.raises(OSError, match="at most 64 operations"):
        engine.zo_lead(0, 0, [perturb] * 65, 4096, "fp8", "bf16")
    with pytest.raises(TypeError, match="bytes"):
        engine.zo_load("no bytes")
    model.lohan.close()
    with pytest.raises(lohan.LohanError, match="closed"):
        engine.zo_lead(0, 0, [])


def test_what_no_gpu_does_is_refused_with_the_way_out(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fatbin = tmp_path / "lohan.fatbin"
    monkeypatch.setattr(_zo_device, "FATBIN", fatbin)
    with pytest.raises(UnsupportedError, match=r'nvcc.*device="cpu"'):
        _zo_device.check("cuda", "philox")
    fatbin.write_bytes(b"kernels")
    _zo_device.check("cuda", "philox")
    assert _zo_device.image() == b"kernels"
    with pytest.raises(UnsupportedError, match=r'rng="philox"'):
        _zo_device.check("cuda", "torch")
    for device in ("cpu", "emu"):
        _zo_device.check(device, "torch")
        _zo_device.check_kept(device, [torch.bfloat16], "fp32", "it")
    for storage in (None, "bf16", "fp8"):
        _zo_device.check_kept("cuda", [torch.bfloat16, torch.float32], storage, "it")
    with pytest.raises(UnsupportedError, match=r'storage="fp8".*device="cpu"'):
        _zo_device.check_kept("cuda", [torch.bfloat16], "fp32", "it")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_a_session_launches_through_the_driver(
    tmp_path: pathlib.Path, store_dir: pathlib.Path
) -> None:
    flags = [*cbuild.LANGUAGE_FLAGS, *cbuild.NUMERIC_FLAGS, "-O1", "-shared"]
    source = ROOT / "tests" / "py" / "fake_driver.c"
    words = [*flags, f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'c'}", str(source)]
    driver = tmp_path / "libcuda.so.1"
    subprocess.run([*cbuild.compiler(), *words, "-lm", "-o", str(driver)], check=True)
    worker = ROOT / "tests" / "py" / "launch_worker.py"
    folders = [str(tmp_path), os.environ.get("LD_LIBRARY_PATH", "")]
    answer = subprocess.run(
        [sys.executable, str(worker), str(store_dir)],
        env={**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, folders))},
        capture_output=True,
        text=True,
        timeout=HUNG_S,
    )
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    assert lines[0] == "refused without kernels"
    assert "cuModuleLoadData for kernel lh_zo_batch: CUDA_ERROR_INVALID_IMAGE" in lines[1]
    # The last round had fewer places than units.
    assert lines[2:-2] == [f"unit {unit} at 12: same" for unit in range(6)]
    assert lines[-2] == "kept: same"
    assert lines[-1] == "alive: 0"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(store_dir: pathlib.Path) -> None:
    with pytest.raises(ModelError, match="finds no GPU"):
        lohan.wrap(helper.opt(), store=store_dir, method="mezo", device="cuda")


def test_the_build_says_whether_there_are_kernels() -> None:
    said = lohan.build_info()["nvcc"]
    assert _zo_device.FATBIN.exists() == ("files)" in said)
    assert bool(_zo_device.image()) == _zo_device.FATBIN.exists()


def test_a_copy_in_main_memory_has_the_units_layout() -> None:
    first = nn.Parameter(torch.arange(6, dtype=torch.float32).view(2, 3))
    second = nn.Parameter(torch.full((5,), 7.0))
    params = [Param("first", first, 0, 0, 0), Param("second", second, 0, 64, 1, kept="bf16")]
    copy = _zo_device.host_bytes([(param, param.tensor.data) for param in params], 128)
    assert copy[:24].view(torch.float32).tolist() == first.flatten().tolist()
    assert copy[64:74].view(torch.bfloat16).tolist() == second.tolist()
    assert int(copy[24:64].count_nonzero()) == int(copy[74:].count_nonzero()) == 0


def test_leads_on_the_cpu_have_the_bits_of_zo_apply(store_dir: pathlib.Path) -> None:
    model = wrapped(helper.opt, store_dir)
    ops: list[Any] = [("perturb", False, 3, 0, 1, 2, 0.5, 0.0, 0.0)]
    made = []
    for first in (0, 77):
        values, expected = torch.ones(1000), torch.ones(1000)
        inside(model).engine.zo_lead(values.data_ptr(), 1000, ops, 0, "fp32", "fp32", first)
        _core.zo_apply(expected.data_ptr(), expected.data_ptr(), first, 1000, ops)
        assert torch.equal(values, expected)
        made.append(values)
    assert torch.equal(made[0][77:], made[1][:-77])
    update: list[Any] = [("round", False, 3, 65535, 1, 2, 0.0, 0.0, 0.0), *ops]
    states = [torch.ones(1000, dtype=torch.float16) for _ in range(2)]
    read = [torch.zeros(1000, dtype=torch.bfloat16) for _ in range(2)]
    inside(model).engine.zo_lead(
        read[0].data_ptr(), 1000, [*ops, *update], states[0].data_ptr(), "fp16", "bf16", 77
    )
    _core.zo_lead(
        states[1].data_ptr(), "fp16", read[1].data_ptr(), "bf16", 77, 1000, [*ops, *update]
    )
    assert torch.equal(*states) and torch.equal(*read)
    assert float((states[0] - 1).abs().max()) > 0.1
    model.lohan.close()
