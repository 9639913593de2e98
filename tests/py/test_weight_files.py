"""Folders of safetensors: which of their files count, what of them is used, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import struct
from pathlib import Path
from typing import Any

import kit
import lohan
import pytest
import torch
from lohan import _core
from lohan.common._inside import inside
from lohan.errors import LohanError, ModelError, StoreError
from lohan.layout._in_place import InPlace
from lohan.store import _store, _weights
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

ONES = {"weight": torch.ones(4, 4), "bias": torch.ones(4)}
TWOS = {name: value * 2 for name, value in ONES.items()}
FLOAT8 = torch.float8_e4m3fn


def linear() -> nn.Linear:
    """Return a layer without values."""
    with lohan.empty():
        return nn.Linear(4, 4)


def weight(folder: Path, store: Path) -> float:
    """The value that a linear layer's weight has from the files of a folder."""
    model = lohan.wrap(linear(), store=store, weights=folder)
    value = float(model.state_dict()["weight"][0, 0])
    model.lohan.close()
    return value


def index(folder: Path, files: dict[str, str]) -> None:
    """Write the index, which maps each tensor to its file."""
    said = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(said))


def test_the_files_that_count_are_those_that_from_pretrained_takes(
    tmp_path: Path, store_dir: Path
) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    save_file(ONES, tmp_path / first)
    save_file(TWOS, tmp_path / second)
    with pytest.raises(ModelError, match=rf"'weight' is in .*{first} and in {second}.*=FILE"):
        weight(tmp_path, store_dir / "none")
    assert weight(tmp_path / second, store_dir / "file") == 2
    index(tmp_path, {"weight": second, "bias": first})
    assert weight(tmp_path, store_dir / "index") == 2
    assert weight(tmp_path / "model.safetensors.index.json", store_dir / "index-file") == 2
    save_file({name: value * 3 for name, value in ONES.items()}, tmp_path / "model.safetensors")
    save_file(TWOS, tmp_path / "model.fp16.safetensors")  # another variant, whose name sorts first
    assert weight(tmp_path, store_dir / "whole") == 3
    (tmp_path / "model.safetensors").unlink()
    # a link into a cache that no longer has the file
    (tmp_path / "model.safetensors").symlink_to("../blobs/0123")
    with pytest.raises(StoreError, match=r"model\.safetensors is a link to \.\./blobs/0123"):
        weight(tmp_path, store_dir / "none")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / second).unlink()
    with pytest.raises(StoreError, match=rf"{second} does not exist"):
        weight(tmp_path, store_dir / "none")
    with pytest.raises(StoreError, match="snapshot_download"):
        weight(Path("facebook/opt-125m"), store_dir / "none")
    assert not (store_dir / "none").exists()


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}']
)
def test_an_invalid_index_is_named(text: str, tmp_path: Path, store_dir: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(StoreError, match=r"index\.json is not a valid index of safetensors"):
        weight(tmp_path, store_dir)


def entry(**changed: Any) -> dict[str, Any]:
    """Return the header of one tensor."""
    return {"weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64], **changed}}


HEADERS: list[Any] = [
    b"[" * 100_000,
    b"\xff\xfe{}",
    b'{"weight": 1, "weight": 2}',
    [],
    5,
    {"weight": 5},
    {"weight": {}},
    entry(dtype=5),
    entry(shape="44"),
    entry(shape=[-4, -4]),
    entry(shape=[4, 5]),
    entry(shape=[True, 16]),
    entry(data_offsets=[64, 0]),
    entry(data_offsets=[-64, 0]),
    entry(data_offsets=[64]),
    entry(data_offsets=[128, 192]),
]


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_a_header_that_makes_no_sense_is_refused_with_the_files_name(
    header: Any, tmp_path: Path, store_dir: Path
) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(128))
    with pytest.raises(StoreError, match=r"model\.safetensors"):
        weight(tmp_path, store_dir)


def test_a_header_of_gigabytes_is_not_read(tmp_path: Path, store_dir: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 3 << 30))
    os.truncate(path, 4 << 30)  # the file is sparse
    with pytest.raises(StoreError, match=r"no.* safetensors file: a header of 3221225472 bytes"):
        weight(tmp_path, store_dir)


def test_only_values_are_converted(tmp_path: Path, store_dir: Path) -> None:
    class Table(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))
            self.table = nn.Parameter(torch.zeros(3).to(dtype), requires_grad=False)

    save_file({"table": torch.tensor([1.0, 2.0, 3.0])}, tmp_path / "floats.safetensors")
    save_file({"table": torch.tensor([1.0, 2.0, 3.0]).to(FLOAT8)}, tmp_path / "fp8.safetensors")
    save_file({"table": torch.tensor([1, 2, 3], dtype=torch.int16)}, tmp_path / "i16.safetensors")
    taken = {"floats": (torch.float16, torch.bfloat16), "i16": (torch.int64,), "fp8": (FLOAT8,)}
    refused = {"floats": (torch.uint8, FLOAT8), "i16": (torch.uint8,), "fp8": (torch.bfloat16,)}
    for name, dtypes in taken.items():
        for dtype in dtypes:
            place = store_dir / f"{name}{dtype}"
            model = lohan.wrap(Table(dtype), store=place, weights=tmp_path / f"{name}.safetensors")
            assert model.state_dict()["table"].float().tolist() == [1, 2, 3]
            model.lohan.close()
    for name, dtypes in refused.items():
        for dtype in dtypes:
            with pytest.raises(
                ModelError, match=rf"{name}\.safetensors: table is .* not quantized"
            ):
                path = tmp_path / f"{name}.safetensors"
                lohan.wrap(Table(dtype), store=store_dir / "none", weights=path)


@pytest.mark.parametrize("dtype", [FLOAT8, torch.float8_e5m2, torch.uint16, torch.uint64])
def test_what_export_writes_weights_reads(
    dtype: torch.dtype, tmp_path: Path, store_dir: Path
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))
            self.table = nn.Parameter(torch.arange(300).to(dtype), requires_grad=False)

        def forward(self) -> torch.Tensor:
            return self.scale.sum() * self.table.float().sum()

    first: Any = lohan.wrap(Model(), store=store_dir / "a")
    expected = first.state_dict()["table"].view(torch.uint8)
    lohan.export(first, tmp_path)
    first.lohan.close()
    second: Any = lohan.wrap(Model(), store=store_dir / "b", weights=tmp_path)
    assert any(unit.runs for unit in inside(second).layout.units), "it is read in place"
    second().backward()
    second.optimizer.step()
    assert torch.equal(second.state_dict()["table"].view(torch.uint8), expected)
    second.lohan.close()
    lohan.wrap(Model(), store=store_dir / "b", resume=True).lohan.close()


def test_persistent_buffers_have_the_values_of_the_files(tmp_path: Path, store_dir: Path) -> None:
    def build() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model.register_buffer("scratch", torch.zeros(3), persistent=False)
        return model

    source = build()
    source[1].running_mean.fill_(5)
    source[1].num_batches_tracked.fill_(7)
    save_file({**source.state_dict(), "scratch": torch.ones(3)}, tmp_path / "a.safetensors")
    with lohan.empty():
        model = build()
    model = lohan.wrap(model, store=store_dir, weights=tmp_path)
    state = source.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not model.scratch.any(), "it is not the files' business"
    model.lohan.close()
    again = lohan.wrap(build(), store=store_dir, resume=True)
    assert torch.equal(again[1].running_mean, source[1].running_mean), "the first commit has them"
    again.lohan.close()
    other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(5))
    with pytest.raises(ModelError, match=r"1\..* is \[4\], but the model has \[5\]"):
        lohan.wrap(other, store=store_dir / "other", weights=tmp_path)


def test_files_without_frozen_parameters_are_not_kept_open_and_there_may_be_any_number(
    tmp_path: Path, store_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def build(frozen: set[int]) -> nn.Sequential:
        model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(5)))
        for number in frozen:
            model[number].requires_grad_(False)
        return model

    def opened() -> list[str]:
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        found = [os.readlink(link) for link in links if os.path.lexists(link)]
        return sorted(path for path in found if path.endswith(".safetensors"))

    for name, value in build(set()).state_dict().items():
        save_file({name: value}, tmp_path / f"{name}.safetensors")
    model = lohan.wrap(build(set()), store=store_dir / "a", weights=tmp_path)
    assert not opened()
    model.lohan.close()
    model = lohan.wrap(build({1, 4}), store=store_dir / "b", weights=tmp_path)
    assert opened() == [str(tmp_path / f"{number}.weight.safetensors") for number in (1, 4)]
    model(torch.ones(1, 2)).sum().backward()
    model.optimizer.step()
    model.lohan.close()
    (tmp_path / "2.weight.safetensors").unlink()  # the store already has this one
    lohan.wrap(build({1, 4}), store=store_dir / "b", resume=True).lohan.close()
    monkeypatch.setattr(_core, "IN_PLACE_FILE_COUNT_MAX", 1)
    model = lohan.wrap(build({1}), store=store_dir / "c", weights=tmp_path)
    assert not capsys.readouterr().err.count("copied") and len(opened()) == 1
    model.lohan.close()
    model = lohan.wrap(build({1, 4}), store=store_dir / "d", weights=tmp_path)
    assert "they are in more than 1 files" in capsys.readouterr().err and not opened()
    model.lohan.close()


def frozen(width: int = 600) -> nn.Sequential:
    """A layer of a MiB and more that is read in place, and a trained one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 1))
    model[0].requires_grad_(False)
    return model


def test_a_file_that_is_cut_while_a_session_has_it_open_ends_no_read_in_a_loop(
    tmp_path: Path, store_dir: Path
) -> None:
    save_file(frozen().state_dict(), tmp_path / "a.safetensors")
    model = lohan.wrap(frozen(), store=store_dir, weights=tmp_path)
    os.truncate(tmp_path / "a.safetensors", 700_000)  # the file now ends inside a block
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it reads forever"))
    signal.alarm(20)
    try:
        with pytest.raises(StoreError, match=r"a\.safetensors was truncated: it ends at 700000"):
            lohan.unwrap(model)
    finally:
        signal.alarm(0)
    model.lohan.close()


def test_a_file_that_is_replaced_while_a_store_is_made_is_refused(
    tmp_path: Path, store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    plain = _store.create

    def create(*arguments: Any, **settings: Any) -> Any:
        values = frozen().state_dict().items()
        save_file({name: value + 1 for name, value in values}, path)
        return plain(*arguments, **settings)

    monkeypatch.setattr(_store, "create", create)
    for number, model in enumerate((frozen(), frozen().requires_grad_(True))):
        save_file(frozen().state_dict(), path)
        os.utime(path, (1, 1))
        with pytest.raises(StoreError, match=r"a\.safetensors was changed while"):
            lohan.wrap(model, store=store_dir / str(number), weights=tmp_path)


def test_a_parameter_without_elements_is_one_of_the_cpu(tmp_path: Path, store_dir: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.empty(0, 4))
            self.some = nn.Parameter(torch.ones(2, 4))

        def forward(self) -> torch.Tensor:
            return torch.cat([self.none, self.some]).sum()

    save_file(Model().state_dict(), tmp_path / "model.safetensors")
    for settings in ({"weights": tmp_path}, {"resume": True}):
        with lohan.empty():
            model = Model()
        lohan.wrap(model, store=store_dir, **settings)  # type: ignore[arg-type]
        assert model().item() == 8
        model.lohan.close()


def test_what_a_constructor_shares_between_modules_stays_shared_in_an_empty_model() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Parameter(torch.ones(4, 4))
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.one.weight = self.two.weight = shared

    with lohan.empty():
        model, lazy = Model(), nn.LazyLinear(4)
    assert model.one.weight is model.two.weight and model.one.weight.is_meta
    assert model.one.bias is not model.two.bias
    with pytest.raises(LohanError, match="is lazy"):
        lohan.wrap(lazy, init="model")


@pytest.mark.parametrize(
    "file",
    ["a\0b", "\ud800", "/etc/passwd", "../other.safetensors", "x/../../y", "", ".", 3, None, ["a"]],
    ids=repr,
)
def test_an_index_that_names_no_file_of_its_folder_is_refused(
    file: Any, tmp_path: Path, store_dir: Path
) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file(frozen().state_dict(), folder / "a.safetensors")
    save_file(frozen().state_dict(), tmp_path / "other.safetensors")
    names = dict.fromkeys(frozen().state_dict(), "a.safetensors")
    names[next(iter(names))] = file
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    with pytest.raises(StoreError, match=r"index\.json (says that .*its own folder|is no)"):
        lohan.wrap(frozen(), store=store_dir / "a", weights=folder)
    assert not (store_dir / "a" / "lohan.data").exists()


def test_a_file_in_a_folder_below_the_index_is_read(tmp_path: Path, store_dir: Path) -> None:
    (tmp_path / "below").mkdir()
    save_file(frozen().state_dict(), tmp_path / "below" / "a.safetensors")
    names = dict.fromkeys(frozen().state_dict(), "below/a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    lohan.wrap(frozen(), store=store_dir, weights=tmp_path).lohan.close()


@pytest.mark.parametrize("name", ["", "model.safetensors.index.json"], ids=["folder", "index"])
def test_a_run_is_resumed_with_the_folder_or_the_index_of_its_files(
    name: str, tmp_path: Path, store_dir: Path
) -> None:
    values = frozen().state_dict()
    for number, key in enumerate(values):  # all files have one name
        (tmp_path / "old" / f"{number}").mkdir(parents=True)
        save_file({key: values[key]}, tmp_path / "old" / f"{number}" / "a.safetensors")
    places = {key: f"{number}/a.safetensors" for number, key in enumerate(values)}
    text = json.dumps({"weight_map": places})
    (tmp_path / "old" / "model.safetensors.index.json").write_text(text)
    lohan.wrap(frozen(), store=store_dir, weights=tmp_path / "old" / name).lohan.close()
    for place in ("old", "new"):
        if place == "new":
            (tmp_path / "old").rename(tmp_path / "new")
        model = lohan.wrap(frozen(), store=store_dir, weights=tmp_path / place / name, resume=True)
        kit.assert_same_state(dict(model.state_dict()), dict(values))
        model.lohan.close()


def test_the_folder_of_an_adapter_is_not_taken_for_its_base(
    tmp_path: Path, store_dir: Path
) -> None:
    save_file(frozen().state_dict(), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(StoreError, match="adapter of peft, without its base"):
        lohan.wrap(frozen(), store=store_dir, weights=tmp_path)
    save_file(frozen().state_dict(), tmp_path / "model.safetensors")  # a base beside an adapter
    lohan.wrap(frozen(), store=store_dir, weights=tmp_path).lohan.close()


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_file_that_changes_while_it_is_copied_or_scanned_is_seen(
    is_frozen: bool, tmp_path: Path, store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first bytes are read, and then the file is written to in place, with its old size.

    Zeroth-order training reads frozen parameters in wrap.
    """
    path = tmp_path / "model.safetensors"
    save_file(frozen().state_dict(), path)
    plain = {"write": _weights.write_param, "read": InPlace._read_blocks}

    def touch() -> None:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")

    def write_param(*arguments: Any, **settings: Any) -> None:
        plain["write"](*arguments, **settings)
        touch()

    def read_blocks(*arguments: Any) -> None:
        plain["read"](*arguments)
        touch()

    monkeypatch.setattr(_weights, "write_param", write_param)
    monkeypatch.setattr(InPlace, "_read_blocks", read_blocks)
    settings: dict[str, Any] = {"method": "mezo"} if is_frozen else {}
    model = frozen() if is_frozen else frozen().requires_grad_()
    os.utime(path, (1, 1))
    with pytest.raises(StoreError, match="was changed while it was being read"):
        lohan.wrap(model, store=store_dir / "a", weights=tmp_path, **settings)
    assert not (store_dir / "a" / "lohan.data").exists()


def test_another_file_of_the_same_size_and_time_in_its_place_is_seen(
    tmp_path: Path, store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    plain = _store.create

    def create(*arguments: Any, **settings: Any) -> Any:
        other = {name: value + 1 for name, value in frozen().state_dict().items()}
        save_file(other, tmp_path / "new")
        os.utime(tmp_path / "new", (1, 1))
        os.replace(tmp_path / "new", path)
        return plain(*arguments, **settings)

    monkeypatch.setattr(_store, "create", create)
    for number, model in enumerate((frozen(), frozen().requires_grad_(True))):
        save_file(frozen().state_dict(), path)
        os.utime(path, (1, 1))
        with pytest.raises(StoreError, match="was changed while"):
            lohan.wrap(model, store=store_dir / str(number), weights=tmp_path)


@pytest.mark.parametrize("kind", ["fifo", "directory"])
def test_weights_that_are_not_a_file_are_refused_and_not_waited_for(
    kind: str, tmp_path: Path, store_dir: Path
) -> None:
    path = tmp_path / "model.safetensors"
    os.mkfifo(path) if kind == "fifo" else path.mkdir()
    with pytest.raises(StoreError, match=r"not a regular file|directory"):
        lohan.wrap(frozen(), store=store_dir, weights=tmp_path)


def place(path: Path, places: dict[str, tuple[int, int]], nbytes: int) -> None:
    """Write a file with these tensors of fp32 at these places, and a number of bytes for them."""
    header = {
        name: {"dtype": "F32", "shape": [4, 4][: 1 + (end - first > 16)], "data_offsets": at}
        for name, at in places.items()
        for first, end in [at]
    }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(nbytes))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("weight_at", "bias_at", "nbytes", "said"),
    [
        ((0, 64), (80, 96), 96, "bias begins at 80, but weight ends at 64.*belong to no tensor"),
        ((16, 80), (80, 96), 96, "weight begins at 16, but what is before it ends at 0"),
        ((0, 64), (60, 76), 76, "bias begins at 60, but weight ends at 64.*are in both"),
        ((0, 64), (48, 64), 64, "bias begins at 48, but weight ends at 64.*are in both"),
        ((0, 64), (64, 80), 96, "the tensors end at 80, but 96 bytes follow.*belong to no tensor"),
    ],
    ids=["hole", "begins late", "overlap", "inside", "trailing"],
)
def test_tensors_that_do_not_fill_a_file_are_refused_as_by_its_library(
    weight_at: tuple[int, int],
    bias_at: tuple[int, int],
    nbytes: int,
    said: str,
    frozen: bool,
    tmp_path: Path,
    store_dir: Path,
) -> None:
    path = tmp_path / "model.safetensors"
    place(path, {"weight": weight_at, "bias": bias_at}, nbytes)
    with pytest.raises(SafetensorError):
        load_file(path)
    with pytest.raises(StoreError, match=rf"model\.safetensors: {said}.*save it again"):
        lohan.wrap(linear().requires_grad_(not frozen), store=store_dir, weights=tmp_path)
    save_file(ONES, path)
    assert weight(tmp_path, store_dir) == 1
