"""Parameters kept in other formats than they are computed with ([Note: Kept parameters])."""

from __future__ import annotations

import errno
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import lohan
import pytest
import torch
from lohan.commands import _inspect
from lohan.common import _storage_formats
from lohan.common._inside import inside
from lohan.common._storage_formats import ROUND_SAMPLE, rounded
from lohan.config import Config
from lohan.errors import ModelError, StoreError, StoreMismatchError, UnsupportedError
from lohan.journal._direction import Stream, normal, words
from lohan.journal._zeroth import Rule
from lohan.mezo import _zo_setup
from lohan.store import _store
from mezo_helper import (
    EPS,
    LR,
    SEED,
    Settings,
    Values,
    batches,
    differing,
    direction,
    gpt2,
    loss_of,
    opt,
    plain_run,
    steps,
)
from quick_helper import half_quick
from test_mezo import least_of
from torch import nn


def bf16() -> nn.Module:
    return opt().bfloat16()


def fp16() -> nn.Module:
    return gpt2().half()


class PlainKept:
    """MeZO with all in memory, whose parameters are of a format between steps."""

    def __init__(self, model: nn.Module, storage: str, *, decay: float = 0, samples: int = 1):
        self.model = model.eval()
        self.storage = storage
        self.decay, self.samples = decay, samples
        self.params = [*model.parameters()]
        dtype = _storage_formats.TYPES[storage]
        self.kept = [_storage_formats.narrowed(p.data, dtype).float() for p in self.params]
        self.step_count = 0

    def _z(self, number: int, sample: int) -> torch.Tensor:
        param = self.params[number]
        return direction(number, self.step_count, sample, param.numel()).view(param.shape)

    def _at(self, sample: int | None, moves: int) -> None:
        for number, param in enumerate(self.params):
            value = self.kept[number]
            for scale in (1.0, -2.0)[:moves]:
                assert sample is not None
                value = value + self._z(number, sample) * torch.tensor(EPS * scale)
            param.data = value.to(param.dtype)

    @torch.no_grad()
    def step(self, batch: torch.Tensor) -> float:
        gradients, losses = [], []
        for sample in range(self.samples):
            sides = []
            for moves in (1, 2):
                self._at(sample, moves)
                sides.append(float(loss_of(self.model, batch)))
            gradients.append((sides[0] - sides[1]) / (2 * EPS))
            losses.append(sides[0])
        for number, value in enumerate(self.kept):
            for sample, gradient in enumerate(gradients):
                change = self._z(number, sample) * torch.tensor(gradient)
                if self.decay:
                    change = change + value * torch.tensor(self.decay)
                value = value - change * torch.tensor(LR / self.samples)
            stream = Stream(SEED, number, self.step_count, ROUND_SAMPLE)
            chance = words(stream, 0, value.numel(), "cpu").view(value.shape)
            self.kept[number] = rounded(value, chance, self.storage)
        self.step_count += 1
        self._at(None, 0)
        return float(torch.tensor(sum(losses) / len(losses)))

    def run(self, data: list[torch.Tensor]) -> tuple[list[float], Values]:
        losses = [self.step(batch) for batch in data]
        return losses, {name: p.data.clone() for name, p in self.model.named_parameters()}


@functools.cache
def kept_run(
    make: Callable[[], nn.Module], storage: str, count: int, decay: float = 0, samples: int = 1
) -> tuple[list[float], Values]:
    """Return the losses of such a run over batches(count), and the parameters after it."""
    return PlainKept(make(), storage, decay=decay, samples=samples).run(batches(count))


def wrapped(model: nn.Module, store: pathlib.Path, **more: Any) -> Any:
    return lohan.wrap(
        model, store=store, method="mezo", **{"lr": LR, "eps": EPS, "seed": SEED, **more}
    )


def name_of(value: Any) -> str:
    """Return a name for a choice: that of a case is the names of its parts."""
    if isinstance(value, tuple):
        return "-".join(map(name_of, value))
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize("is_closed", [False, True], ids=["open", "closed"])
def test_export_and_unwrap_give_what_is_computed_with(
    is_closed: bool, store_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    from safetensors.torch import load_file

    data = batches(3)
    for make, storage in ((opt, "bf16"), (bf16, "bf16"), (bf16, "fp32"), (fp16, "bf16")):
        plain = PlainKept(make(), storage)
        _, values = plain.run(data)
        names = [name for name, _ in plain.model.named_parameters()]
        kept = dict(zip(names, plain.kept, strict=True))
        place, out = (
            store_dir / f"{make.__name__}-{storage}",
            tmp_path / f"{make.__name__}{storage}",
        )
        model = wrapped(make(), place, storage=storage)
        steps(model, data)
        if is_closed:
            model.lohan.close()
        lohan.export(place, out)
        exported = load_file(out / "model.safetensors")
        assert {key for key in exported} <= set(values)
        assert all(torch.equal(value, values[key]) for key, value in exported.items())
        lohan.export(place, out / "wide", dtype="float32")
        wide = load_file(out / "wide" / "model.safetensors")
        assert all(torch.equal(value, kept[key]) for key, value in wide.items())
        lohan.unwrap(model)
        assert differing(model, values) == []
        assert all(param.requires_grad for param in model.parameters())


def test_a_run_continues_with_its_own_format_by_either_name(store_dir: pathlib.Path) -> None:
    for make, then, now in ((bf16, None, "bf16"), (opt, None, "fp32"), (opt, "fp32", None)):
        place = store_dir / f"{make.__name__}-{then}-{now}"
        wrapped(make(), place, storage=then).lohan.close()
        wrapped(make(), place, resume=True, lr=None, storage=now).lohan.close()
        with pytest.raises(StoreMismatchError, match="storage='fp8'"):
            wrapped(make(), place, resume=True, lr=None, storage="fp8")


def test_only_what_is_kept_in_a_format_is_cut_to_its_range(
    store_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    from safetensors.torch import save_file

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    large = {name: torch.full_like(p, 1e9) for name, p in model.named_parameters()}
    save_file(large, tmp_path / "model.safetensors")
    model.half()[0].requires_grad_(False)
    model = wrapped(model, store_dir, weights=tmp_path)
    values = {name: float(value.max()) for name, value in model.state_dict().items()}
    assert values["0.weight"] == float("inf"), "as load_state_dict has it"
    assert values["1.weight"] == 65504
    model.lohan.close()


def test_a_16_bit_model_s_own_files_are_read_in_place(
    store_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    data = batches(4)
    losses, values = kept_run(bf16, "bf16", len(data))
    bf16().save_pretrained(tmp_path / "base")
    before = (tmp_path / "base" / "model.safetensors").read_bytes()
    model = wrapped(bf16(), store_dir, weights=tmp_path / "base", write_every="never")
    assert all(unit.runs for unit in inside(model).layout.units)
    assert steps(model, data) == losses
    assert differing(model, values) == []
    model.lohan.close()
    assert (tmp_path / "base" / "model.safetensors").read_bytes() == before
    again = lohan.wrap(bf16(), store=store_dir, method="mezo", resume=True)
    assert differing(again, values) == []
    again.lohan.close()


def test_files_of_another_format_are_copied(
    store_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    data = batches(3)
    _, values = kept_run(opt, "bf16", len(data))
    opt().save_pretrained(tmp_path / "base")
    model = wrapped(
        opt(), store_dir, weights=tmp_path / "base", storage="bf16", write_every="never"
    )
    assert not any(unit.runs for unit in inside(model).layout.units)
    steps(model, data)
    assert differing(model, values) == []
    model.lohan.close()


def test_half_the_bits_are_half_the_bytes_on_the_link_and_on_ssd(store_dir: pathlib.Path) -> None:
    moved: dict[str, int] = {}
    for storage in ("fp32", "fp16", "fp8"):
        units = inside(wrapped(opt(), store_dir / f"{storage}-s", storage=storage)).layout.units
        slots = sum(sorted(unit.place_bytes for unit in units)[-3:])
        device = {"device": "emu", "device_param_bytes": slots, "device_bytes": 2 * slots}
        model = wrapped(opt(), store_dir / storage, storage=storage, **device)
        steps(model, batches(2))
        before = model.optimizer.read_bytes
        steps(model, batches(4))
        moved[storage] = model.optimizer.read_bytes - before
        bits = _storage_formats.TYPES[storage].itemsize
        layout = inside(model).layout
        count = sum(param.count for param in layout.params)
        assert sum(unit.nbytes for unit in layout.units) < bits * count + 5000 * len(layout.units)
        model.lohan.close()
    # Units are padded to 4 KiB, which is much of one here.
    assert moved["fp16"] < 0.6 * moved["fp32"]
    assert moved["fp8"] < 0.4 * moved["fp32"]


def test_how_often_is_written_goes_by_what_is_kept(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _zo_setup.best_every(0.5e-9, 1e9, 2e9, 1) == 2, "4 bytes: 5"
    asked = []

    def best(z_seconds: float, writes: float, reads: float, element_bytes: int) -> int:
        asked.append(element_bytes)
        return 7

    monkeypatch.setattr(_zo_setup, "best_every", best)
    for make, storage in ((opt, None), (opt, "bf16"), (bf16, None), (bf16, "fp8"), (bf16, "fp32")):
        model = wrapped(make(), store_dir / str(len(asked)), storage=storage, host_bytes=9_000_000)
        assert inside(model).method.zeroth.write_every == 7
        model.lohan.close()
    assert asked == [4, 2, 2, 1, 4]


def test_a_step_that_dies_has_not_happened(store_dir: pathlib.Path) -> None:
    data = batches(4)
    losses, values = kept_run(opt, "bf16", len(data))
    asked: dict[str, Any] = {"storage": "bf16"}
    model = wrapped(opt(), store_dir, host_bytes=least_of(opt(), **asked), **asked)
    assert steps(model, data[:2]) == losses[:2]
    for calls in (1, 2):
        left = [calls]

        def dies(left: list[int] = left) -> Any:
            loss = loss_of(model, data[2])
            left[0] -= 1
            if left[0] == 0:
                raise KeyError("dies")
            return loss

        with pytest.raises(KeyError):
            model.zo_step(dies)
    assert steps(model, data[2:]) == losses[2:]
    assert differing(model, values) == []
    model.lohan.close()


class Interrupted:
    """A store that raises a Ctrl-C after one of its calls."""

    def __init__(self, store: Any, name: str, calls: int) -> None:
        self._store, self._name, self._left = store, name, calls

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)
        if name != self._name:
            return call

        def made(*args: Any) -> None:
            call(*args)
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt

        return made


@pytest.mark.parametrize(
    ("storage", "call"),
    half_quick(["bf16", "fp32"], [("write", 1), ("write", 4), ("commit", 1)]),
    ids=name_of,
)
def test_a_ctrl_c_behind_a_write_leaves_the_bits_as_they_are(
    storage: str, call: tuple[str, int], store_dir: pathlib.Path
) -> None:
    data = batches(6)
    plain = plain_run(opt, 6, Settings())
    losses, values = plain if storage == "fp32" else kept_run(opt, storage, len(data))
    asked: dict[str, Any] = {"storage": storage, "write_every": 4}
    model = wrapped(opt(), store_dir, host_bytes=least_of(opt(), **asked), **asked)
    session = inside(model)
    assert steps(model, data[:3]) == losses[:3]
    store = session.store
    session.store = Interrupted(store, *call)
    with pytest.raises(KeyboardInterrupt):
        model.optimizer.write_back()
    session.store = store
    assert session.method.run.base == int(store.describe()["step"])
    assert steps(model, data[3:]) == losses[3:]
    assert differing(model, values) == []
    model.lohan.close()


class Refusing:
    """A store whose disk fails every write."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write(self, *args: Any) -> None:
        raise StoreError(errno.EIO, "no write is taken")


def test_a_disk_that_takes_no_write_is_named_and_costs_no_bit(store_dir: pathlib.Path) -> None:
    data = batches(5)
    losses, values = kept_run(opt, "bf16", len(data))
    asked: dict[str, Any] = {"storage": "bf16", "write_every": 4}
    model = wrapped(opt(), store_dir, host_bytes=least_of(opt(), **asked), **asked)
    session = inside(model)
    assert steps(model, data[:3]) == losses[:3]
    store = session.store
    session.store = Refusing(store)
    with pytest.raises(StoreError, match="no write is taken"):
        model.optimizer.write_back()
    session.store = store
    assert steps(model, data[3:]) == losses[3:]
    assert differing(model, values) == []
    assert session.method.run.base == 4
    model.lohan.close()


def test_an_export_behind_an_interrupted_write_is_of_one_step(
    store_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    from safetensors.torch import load_file

    plain = PlainKept(bf16(), "fp32")
    plain.run(batches(3))
    names = [name for name, _ in plain.model.named_parameters()]
    model = wrapped(bf16(), store_dir, storage="fp32", write_every=9)
    steps(model, batches(3))
    store = inside(model).store
    inside(model).store = Interrupted(store, "write", 2)
    with pytest.raises(KeyboardInterrupt):
        model.optimizer.write_back()
    inside(model).store = store
    lohan.export(model, tmp_path / "out", dtype="float32")
    model.lohan.close()
    wide = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(wide[k], v) for k, v in zip(names, plain.kept, strict=True) if k in wide)


def test_what_a_format_cannot_be_is_refused_by_name(store_dir: pathlib.Path) -> None:
    for model, more, error in (
        (opt(), {"storage": "int4"}, ModelError),
        (opt(), {"storage": "bf16", "rng": "torch"}, UnsupportedError),
        (bf16(), {"rng": "torch"}, UnsupportedError),
        (opt(), {"storage": "bf16", "num_samples": 2000}, UnsupportedError),
        (opt().double(), {}, ModelError),
    ):
        with pytest.raises(error, match="|".join([*more, "float64"])):
            wrapped(model, store_dir, **more)
    with pytest.raises(ModelError, match="storage"):
        lohan.wrap(opt(), store=store_dir, storage="bf16")
    assert list(store_dir.iterdir()) == []


def test_what_is_too_large_for_a_format_becomes_its_largest_number() -> None:
    values = torch.tensor([1e9, -1e9, 500.0, 2**-10 * 1.01, float("nan")])
    assert _storage_formats.narrowed(values, torch.float16)[:2].tolist() == [65504.0, -65504.0]
    assert _storage_formats.narrowed(values, torch.float8_e4m3fn).float()[:4].tolist() == [
        448.0,
        -448.0,
        448.0,
        2**-9,
    ]
    assert _storage_formats.narrowed(values, torch.bfloat16)[4].isnan()


def test_weights_that_a_format_has_no_number_near_are_told(
    store_dir: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model: Any = opt()
    count = sum(param.numel() for param in model.parameters())
    with torch.no_grad():
        model.lm_head.weight[0, :3] = torch.tensor([1000.0, -449.0, 448.0])
        model.lm_head.weight[0, 3:6] = torch.tensor([2**-10, 2**-10 * 1.01, 0.0])
    values = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    zeros = int((values.to(torch.float8_e4m3fn).float().eq(0) & values.ne(0)).sum())
    model.save_pretrained(tmp_path / "base")
    for name, more in (("a", {}), ("b", {"weights": tmp_path / "base"})):
        wrapped(model, store_dir / name, storage="fp8", **more).lohan.close()
        said = capsys.readouterr().err
        assert f"of {count:,} weights" in said
        assert f"{zeros:,} ({zeros / count:.1%}) are too small" in said
        assert "2 are too large" in said
        model = opt()
    wrapped(opt(), store_dir / "c", storage="bf16").lohan.close()
    assert "too small" not in capsys.readouterr().err


def test_a_store_that_says_nothing_of_formats_continues_and_new_ones_name_theirs(
    store_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    data = batches(4)
    losses, values = plain_run(opt, 4, Settings())
    describe = _store.describe

    def as_before(layout: Any) -> dict[str, Any]:
        made = describe(layout)
        for key in ("storage", "kept"):
            made["method"].pop(key)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_store, "describe", as_before)
        model = wrapped(opt(), store_dir / "old")
    assert "kept" not in json.loads(inside(model).store.describe()["meta"])["method"]
    assert steps(model, data[:2]) == losses[:2]
    model.lohan.close()
    again = lohan.wrap(opt(), store=store_dir / "old", method="mezo", resume=True)
    assert steps(again, data[2:]) == losses[2:]
    assert differing(again, values) == []
    again.lohan.close()
    lohan.export(store_dir / "old", tmp_path / "out")
    assert _inspect.describe([str(store_dir / "old")])["storage"] is None
    model = wrapped(opt(), store_dir / "new", storage="fp8")
    meta = json.loads(inside(model).store.describe()["meta"])
    assert meta["method"]["storage"] == "fp8"
    assert set(meta["method"]["kept"]) == {"fp8"}
    model.lohan.close()


def test_a_run_that_continues_on_a_gpu_is_refused_what_a_new_one_is() -> None:
    model = bf16()
    asked: dict[str, Any] = dict.fromkeys(
        (
            "lr",
            "betas",
            "eps",
            "weight_decay",
            "max_grad_norm",
            "optimizer",
            "num_samples",
            "rng",
            "seed",
            "storage",
        )
    )
    zeroth = _zo_setup.make(model, asked, Config(device="cpu"), None)
    zeroth.device = "cuda"
    for storage in (None, "bf16", "fp8"):
        _zo_setup.find(zeroth, None, {"method": {"storage": storage}})
        zeroth.storage = None
    with pytest.raises(UnsupportedError, match=r"storage='fp32'\) on a GPU.*device=\"cpu\""):
        _zo_setup.find(zeroth, None, {"method": {"storage": "fp32"}})
    zeroth.storage, zeroth.rule = "bf16", Rule(0, EPS, 61)
    with pytest.raises(UnsupportedError, match=r"num_samples 61.* 60 at most"):
        _zo_setup.find(zeroth, None, {"method": {"storage": "bf16"}})


def test_steps_that_a_format_cannot_tell_apart_are_not_lost(store_dir: pathlib.Path) -> None:
    begin = {name: p.data.bfloat16().float() for name, p in opt().named_parameters()}
    model = wrapped(opt(), store_dir, storage="bf16", lr=1e-7, runs="apart")
    records = inside(model).method.journal.records
    steps(model, batches(10))
    moved = {
        name: value - begin[name] for name, value in model.state_dict().items() if name in begin
    }
    asked = {name: torch.zeros_like(value) for name, value in begin.items()}
    nearest = {name: value.clone() for name, value in begin.items()}
    for step, record in enumerate(records):
        for number, name in enumerate(begin):
            stream = Stream(SEED, number, step, 0)
            z = normal(stream, 0, begin[name].numel(), "cpu").view(begin[name].shape)
            change = -record.lr * record.gradients[0] * z
            asked[name] += change
            nearest[name] = (nearest[name] + change).bfloat16().float()
    model.lohan.close()

    def share(values: Values) -> float:
        """Of what the steps ask for."""
        made = sum(float((values[name] * asked[name]).double().sum()) for name in asked)
        return made / sum(float(asked[name].double().square().sum()) for name in asked)

    assert share({name: nearest[name] - begin[name] for name in begin}) < 0.2
    assert 0.9 < share(moved) < 1.1
