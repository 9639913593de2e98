"""The device on which a model computes, and the error for a batch on another one."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pathlib
import re
import types
from typing import Any

import lohan
import pytest
import torch
from lohan import _core
from lohan.common._inside import inside
from lohan.errors import DeviceMismatchError, ModelError
from lohan.torch_glue import _device
from lohan.torch_glue._batch import BatchCheck
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from transformers import BatchEncoding, Trainer, TrainingArguments

WIDTH = 8
ROWS = 2
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Batch:
    rows: torch.Tensor
    name: str = "batch"


class Net(nn.Module):
    """Takes its rows in any container."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Any, scale: Any = None) -> torch.Tensor:
        while not isinstance(rows, torch.Tensor):
            if isinstance(rows, BatchEncoding | dict):
                rows = rows["rows"]
            else:
                rows = rows.rows if isinstance(rows, Batch) else rows[0]
        y = self.layer(rows)
        return (y if scale is None else y * scale).square().mean()


@pytest.fixture
def sees_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch report one GPU; any further use of it would fail here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_device, "_said_gpu", False)


def here() -> torch.Tensor:
    return torch.ones(ROWS, WIDTH)


def away() -> torch.Tensor:
    return torch.ones(ROWS, WIDTH, device="meta")


def wrap(store: pathlib.Path, **settings: Any) -> Any:
    return lohan.wrap(Net(), store=store, **settings)


# --- The default ----------------------------------------------------------------------------------


def test_without_device_a_model_computes_on_the_cpu_where_torch_sees_a_gpu(
    store_dir: pathlib.Path, sees_a_gpu: None, capfd: pytest.CaptureFixture[str]
) -> None:
    model = wrap(store_dir / "one")
    assert inside(model).device.torch_device == CPU
    model(here()).backward()
    model.optimizer.step()
    model.lohan.close()
    said = [line for line in capfd.readouterr().err.splitlines() if "torch finds 1 GPU" in line]
    assert len(said) == 1
    assert said[0].startswith("lohan: computing on the CPU") and 'device="cuda"' in said[0]
    wrap(store_dir / "two").lohan.close()
    assert "torch finds" not in capfd.readouterr().err, "it is said once a process"


@pytest.mark.parametrize(
    "settings",
    [
        {"activations": "recompute"},
        {"activations": "auto"},
        {"accumulate": 2},
        {"method": "mezo", "runs": "together"},
    ],
    ids=str,
)
def test_no_setting_touches_the_gpu_of_a_model_that_computes_on_the_cpu(
    store_dir: pathlib.Path, settings: dict[str, Any], sees_a_gpu: None
) -> None:
    """Torch is built without CUDA here, so that any call but those of the fixture would raise."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(4)]
    model = lohan.wrap(nn.Sequential(*layers), store=store_dir / "store", **settings)
    with contextlib.closing(model.lohan):
        for step in range(1, 5):
            if "method" in settings:
                model.zo_step(lambda: model(here()).square().mean())
            else:
                with torch.autocast("cpu", torch.bfloat16):
                    model(here()).square().mean().backward()
                model.optimizer.step()
            assert model.lohan.step == step
    assert not torch.cuda.is_initialized()


def test_who_names_a_device_is_not_told_of_the_gpu(
    store_dir: pathlib.Path, sees_a_gpu: None, capfd: pytest.CaptureFixture[str]
) -> None:
    wrap(store_dir / "cpu", device="cpu").lohan.close()
    wrap(store_dir / "emu", device="emu").lohan.close()
    assert "torch finds" not in capfd.readouterr().err


def test_a_machine_without_a_gpu_is_told_nothing(
    store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert not torch.cuda.is_available(), "tests/py/conftest.py hides every GPU"
    wrap(store_dir / "store").lohan.close()
    assert "GPU" not in capfd.readouterr().err


def test_a_torch_device_is_a_device(store_dir: pathlib.Path, sees_a_gpu: None) -> None:
    assert _device.parse(torch.device("cpu")) == ("cpu", 0)
    assert _device.parse(torch.device("cuda")) == ("cuda", 0)
    assert _device.parse(torch.device("cuda", 0)) == ("cuda", 0)
    with pytest.raises(ModelError, match=r"'cuda:1'.*1 GPUs"):
        _device.parse(torch.device("cuda", 1))
    wrap(store_dir / "store", device=torch.device("cpu")).lohan.close()


@pytest.mark.parametrize("device", ["mps", "cuda:x", 0, torch.device("meta")])
def test_what_is_no_device_is_refused_by_name(store_dir: pathlib.Path, device: Any) -> None:
    with pytest.raises(ModelError, match=r"'cpu', 'cuda', 'cuda:INDEX',? (or )?'emu'"):
        wrap(store_dir / "store", device=device)


# --- A Trainer ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "trainers", "expected"),
    [
        (None, CPU, "cpu"),
        (None, CUDA, "cuda:0"),
        ("cpu", CPU, "cpu"),
        ("emu", CPU, "emu"),
        ("cuda", CUDA, "cuda"),
        ("cuda:0", CUDA, "cuda:0"),
        ("cuda", torch.device("cuda"), "cuda"),
    ],
)
def test_with_a_trainer_the_model_computes_where_the_trainer_puts_batches(
    name: str | None, trainers: torch.device, expected: str, sees_a_gpu: None
) -> None:
    assert _device.of_trainer(name, trainers) == expected


@pytest.mark.parametrize(
    ("name", "trainers", "way_out"),
    [
        ("cpu", CUDA, "use_cpu=True in"),
        ("emu", CUDA, "use_cpu=True in"),
        ("cuda", CPU, "leave use_cpu=True out"),
        ("cuda:0", torch.device("cuda", 1), "omit device="),
    ],
)
def test_a_device_that_is_not_the_trainers_is_refused(
    name: str, trainers: torch.device, way_out: str, sees_a_gpu: None
) -> None:
    with pytest.raises(ModelError, match=rf"{name}.*Trainer puts batches on {trainers}") as found:
        _device.of_trainer(name, trainers)
    assert way_out in str(found.value)


def test_a_callback_for_another_device_than_its_trainers_is_refused_by_train(
    store_dir: pathlib.Path, sees_a_gpu: None
) -> None:
    trainer = Trainer(
        Net(),
        TrainingArguments(str(store_dir / "out"), use_cpu=True, report_to="none", max_steps=1),
        train_dataset=[{"rows": torch.ones(WIDTH)}] * 8,
        callbacks=[lohan.TrainerCallback(store=store_dir / "store", device="cuda")],
    )
    with pytest.raises(ModelError, match=r"'cuda'.*the Trainer puts batches on cpu"):
        trainer.train()


# --- A batch that is elsewhere --------------------------------------------------------------------

CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "an argument": ((away(),), {}, "'rows' is on meta"),
    "a keyword": ((), {"rows": away()}, "'rows' is on meta"),
    "a dict": (({"rows": away()},), {}, "\"rows['rows']\" is on meta"),
    "a BatchEncoding": ((BatchEncoding({"rows": away()}),), {}, "\"rows['rows']\" is on meta"),
    "a dataclass": ((Batch(away()),), {}, "'rows.rows' is on meta"),
    "a namedtuple": ((Pair(away(), 1),), {}, "'rows.first' is on meta"),
    "a nest": (([({"rows": away()},)],), {}, "\"rows[0][0]['rows']\" is on meta"),
    "one of two": ((here(), away()), {}, "'scale' is on meta"),
    "a keyword of two": ((here(),), {"scale": away()}, "'scale' is on meta"),
    "a 0-dim tensor": ((here(), torch.ones((), device="meta")), {}, "'scale' is on meta"),
}


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("call", CALLS)
def test_a_batch_elsewhere_is_refused_in_the_first_forward(
    store_dir: pathlib.Path, call: str, device: str
) -> None:
    args, kwargs, said = CALLS[call]
    model = wrap(store_dir / "store", device=device)
    with contextlib.closing(model.lohan):
        with pytest.raises(DeviceMismatchError, match=re.escape(said)) as found:
            model(*args, **kwargs)
        assert "the model computes on cpu" in str(found.value)
        assert ".to('cpu')" in str(found.value)
        model(here()).backward()  # and nothing is left over
        model.optimizer.step()
        assert model.lohan.step == 1


class Elsewhere(nn.Module):
    """A model that computes on the meta device, with a batch of which some is in main memory."""

    def forward(self, rows: Any, lengths: Any = None, *others: Any) -> None:
        """Do nothing."""


def refused(device: torch.device, *args: Any, **kwargs: Any) -> str:
    check = BatchCheck(device)
    try:
        check.check(Elsewhere(), args, kwargs)
    except DeviceMismatchError as error:
        assert check.is_due, "the next forward is looked at again"
        return str(error)
    assert not check.is_due
    return ""


def test_a_batch_in_main_memory_is_refused_by_a_model_that_computes_elsewhere() -> None:
    meta = torch.device("meta")
    said = refused(meta, here())
    assert "'rows' is on cpu, but the model computes on meta" in said
    assert ".to('meta')" in said and "device='cpu'" in said
    said = refused(meta, here(), here(), here(), here(), mask=here())
    assert "'rows' is on cpu, 'lengths' is on cpu, 'argument 2' is on cpu (and 2 more)" in said


def test_lengths_indices_and_numbers_in_main_memory_are_no_mistake() -> None:
    meta = torch.device("meta")
    assert refused(meta, away(), torch.tensor([2, 1])) == ""
    assert refused(meta, away(), torch.tensor(0.5)) == ""
    assert refused(meta, torch.tensor(0.5), 3, None, "text") == ""
    packed = pack_padded_sequence(here()[:, :, None], torch.tensor([WIDTH, 1]), batch_first=True)
    assert refused(meta, packed._replace(data=packed.data.to("meta"))) == ""


def test_a_batch_that_holds_itself_is_looked_at_to_an_end() -> None:
    nest: list[Any] = [here()]
    nest.append(nest)
    assert refused(CPU, nest) == ""


def test_forwards_after_the_first_are_not_looked_at(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrap(store_dir / "store")
    looked: list[int] = []
    plain = BatchCheck._away
    monkeypatch.setattr(
        BatchCheck, "_away", lambda self, *args: (looked.append(1), plain(self, *args))[1]
    )
    with contextlib.closing(model.lohan):
        for _ in range(3):
            model(here()).backward()
            model.optimizer.step()
        assert len(looked) == 1


def test_an_error_of_a_later_forward_names_what_is_elsewhere(store_dir: pathlib.Path) -> None:
    model = wrap(store_dir / "store")
    with contextlib.closing(model.lohan):
        model(here()).backward()
        model.optimizer.step()
        with pytest.raises(RuntimeError, match="device meta") as found:
            model(here(), away())  # the error is torch's own, of the multiplication
        assert not isinstance(found.value, DeviceMismatchError)
        assert any("'scale' is on meta, but the model" in note for note in found.value.__notes__)
        with pytest.raises(DeviceMismatchError, match="'scale' is on meta"):
            model(here(), away())
        with pytest.raises(RuntimeError, match="shapes") as found:
            model(torch.ones(ROWS, WIDTH + 1))
        assert not hasattr(found.value, "__notes__"), "an error of another kind has no such note"
        model(here()).backward()
        model.optimizer.step()


@pytest.mark.parametrize(
    ("text", "node_count", "node"),
    [("1\n", 2, 1), ("0\n", 1, 0), ("-1\n", 2, -1), ("1\n", 1, -1), ("\n", 2, -1), (None, 2, -1)],
)
def test_main_memory_is_on_the_node_that_the_system_names_for_the_gpu(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str | None,
    node_count: int,
    node: int,
) -> None:
    """An unknown node, or one that libnuma does not know, is no preference."""
    gpu = types.SimpleNamespace(pci_domain_id=1, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(_device, "_PCI_DEVICES", tmp_path)
    monkeypatch.setattr(_core, "build_info", lambda: {"numa_nodes": node_count})
    if text is not None:
        (tmp_path / "0001:c1:00.0").mkdir()
        (tmp_path / "0001:c1:00.0" / "numa_node").write_text(text)
    assert _device._numa_node(0) == node


def test_a_gpu_that_torch_cannot_place_has_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: object())
    assert _device._numa_node(0) == -1


def test_with_a_gpu_workers_leave_cores_to_the_threads_that_launch_kernels() -> None:
    gpu = _device.Device("cuda")
    assert [gpu.worker_count(n) for n in (1, 2, 3, 4, 6, 8, 16)] == [1, 1, 2, 2, 3, 5, 13]
    for name in ("cpu", "emu"):
        other = _device.Device(name)
        assert other.worker_count(16) == 16 and other.workers_nice == 0
