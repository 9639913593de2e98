"""The files that Python parses: each target has samples from lohan itself and the parser."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pathlib
import struct
import subprocess
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import gguf_files
import lohan
import mutate
import steps_files
import torch
from hypothesis import strategies as st
from lohan import _core
from lohan.activations import _planner, _profile, _shapes
from lohan.commands import _inspect
from lohan.common import _meta, _units
from lohan.common._timeline import Span, write_perfetto
from lohan.errors import LohanError
from lohan.hf import _trainer_folders
from lohan.journal import _journal
from lohan.journal._zeroth import Record, Rule
from lohan.layout import _block, _files, _index, _safetensors
from lohan.planning import _machines
from lohan.session import _trace
from lohan.store import _contents, _requests, _same, _scalars, _store
from lohan.torch_glue import _buffers
from torch import nn

CORPUS = pathlib.Path(__file__).resolve().parent / "corpus"
UUID = bytes(range(16))
JOURNAL_SAMPLES_MAX = 64


@dataclasses.dataclass
class Target:
    """A parser to fuzz.

    Attributes:
        name: the target's name, and that of its corpus.
        make: makes the samples.
        run: parses one input.
        functions: the functions whose lines are counted.
        is_json: the samples are JSON values.
        is_cache: the parser ignores invalid content instead of raising an error.
        count: the number of inputs so far.
    """

    name: str
    make: Callable[[pathlib.Path], list[Any]]
    run: Callable[[bytes, pathlib.Path], None]
    functions: tuple[Any, ...]
    is_json: bool = True
    is_cache: bool = False
    count: int = 0
    strategy: Callable[[list[Any]], st.SearchStrategy[bytes]] | None = None

    def changes(self, samples: list[Any]) -> st.SearchStrategy[bytes]:
        """Generate changed samples."""
        if self.strategy is not None:
            return self.strategy(samples)
        return mutate.of_json(samples) if self.is_json else mutate.of_bytes(samples)

    def corpus(self) -> list[bytes]:
        """Inputs that once failed, or that reach code which is hard to reach."""
        folder = CORPUS / self.name
        return [path.read_bytes() for path in sorted(folder.glob("*"))]


# --- The journal of zeroth-order training -------------------------------------------------------


def journal_make(folder: pathlib.Path) -> list[bytes]:
    made = []
    for samples, steps in ((1, 0), (1, 3), (3, 2)):
        where = folder / f"journal-{samples}-{steps}"
        where.mkdir()
        journal = _journal.Journal.create(where, UUID, Rule(7, 1e-3, samples))
        record = Record(0.1, 0.0, (0.5,) * samples, (1.0,) * samples)
        for _ in range(steps):
            journal.append(record)
        journal.close()
        made.append((where / _journal.NAME).read_bytes())
    lines = [made[1][at : at + 64] for at in range(0, len(made[1]), 64)]
    made.append(b"".join([lines[0], lines[2], lines[1], lines[3]]))
    at = struct.calcsize("<4sIQd")
    made.append(journal_seal(made[1][:at] + bytes(4) + made[1][at + 4 :], 1))
    return made


def journal_seal(data: bytes, which: int) -> bytes:
    """Correct some of a journal's checksums."""
    lines = [data[at : at + 64] for at in range(0, len(data), 64)]
    for index, line in enumerate(lines):
        if len(line) == 64 and which >> (index % 8) & 1:
            lines[index] = line[:60] + struct.pack("<I", _core.crc32c(line[:60]))
    return b"".join(lines)


def journal_changes(samples: list[Any]) -> st.SearchStrategy[bytes]:
    return st.builds(journal_seal, mutate.of_bytes(samples), st.integers(0, 255))


def refuses(call: Callable[[], Any]) -> None:
    """Check that a call raises one of lohan's errors."""
    try:
        call()
    except LohanError:
        return
    raise AssertionError("no error")


def journal_run(data: bytes, folder: pathlib.Path) -> None:
    refuses(lambda: _journal.read([str(folder / "absent")], UUID))
    (folder / _journal.NAME).write_bytes(data)
    try:
        rule, records = _journal.read([str(folder)], UUID)
    except LohanError:
        rule, records = None, []
    opened = _journal.Journal.open(folder, UUID)
    try:
        assert opened.rule == rule and len(opened.records) == len(records)
        if opened.rule.samples > JOURNAL_SAMPLES_MAX:
            return  # a step with this many directions would take gigabytes
        opened.append(Record(0.1, 0.0, (0.5,) * opened.rule.samples))
    finally:
        opened.close()
    assert len(_journal.read([str(folder)], UUID)[1]) == len(records) + 1


# --- Weights: safetensors and their index -------------------------------------------------------


def weights_make(folder: pathlib.Path) -> list[bytes]:
    texts = [
        {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}},
        {
            "__metadata__": {"format": "pt"},
            "w": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]},
            "b": {"dtype": "NEW", "shape": [], "data_offsets": [8, 16]},
        },
    ]
    return [framed(json.dumps(text).encode()) for text in texts]


def framed(text: bytes, values: bytes = bytes(16)) -> bytes:
    """A file with this header, whose length is right, and the bytes that a sample describes."""
    return struct.pack("<Q", len(text)) + text + values


def weights_changes(samples: list[Any]) -> st.SearchStrategy[bytes]:
    values = [json.loads(data[8:-16]) for data in samples]
    return st.one_of(
        mutate.of_bytes(samples),
        mutate.of_json(values).map(framed),
        mutate.of_json(values).map(lambda text: framed(text[:-1] + b", " + text[1:])),
    )


def weights_run(data: bytes, folder: pathlib.Path) -> None:
    pipe = folder / "pipe"
    if not pipe.exists():
        os.mkfifo(pipe)
    for place in (pipe, folder, folder / "absent"):
        refuses(lambda place=place: _files.read_header(place))  # type: ignore[misc]
    path = folder / "model.safetensors"
    path.write_bytes(data)
    found = _files.read_folder(folder)
    size = path.stat().st_size
    for entry in found.entries.values():
        assert 0 <= entry.offset and entry.nbytes >= 0 and entry.offset + entry.nbytes <= size
    _files.match(nn.ParameterDict({"a": nn.Parameter(torch.zeros(2, 2))}), found)


def index_make(folder: pathlib.Path) -> list[Any]:
    for at, name in enumerate(("one", "two")):  # which disagree on the same tensor
        data = framed(weights_make(folder)[0][8:-16], bytes([at]) * 16)
        (folder / f"{name}.safetensors").write_bytes(data)
    files = {"a": "one.safetensors", "b": "two.safetensors"}
    names = ({"a": "two.safetensors", "b": "one.safetensors"}, {"c": files["a"], "d": files["b"]})
    return [{"metadata": {"total_size": 32}, "weight_map": made} for made in (files, *names)]


def index_run(data: bytes, folder: pathlib.Path) -> None:
    for place in (folder, folder / "absent"):
        refuses(lambda place=place: _index.of_index(place))  # type: ignore[misc]
    (folder / "model.safetensors.index.json").write_bytes(data)
    _files.read_folder(folder)


# --- Beside a store: profiles, requests, answers, checkpoints ------------------------------------


def profile_make(folder: pathlib.Path) -> list[Any]:
    visit = _profile.Visit("b", ["b", "b.l"], [0], [(0, 0)], [], [5, 6], [7, 8])
    profile = _profile.Profile([64, 32], [visit], [(1, 0)], 11)
    text = json.loads(profile.as_json())
    return [{"key": {"shape": text}, "other": {}}]


def profile_changes(samples: list[Any]) -> st.SearchStrategy[bytes]:
    """A file whose profiles are texts in it."""

    def packed(text: bytes) -> bytes:
        try:
            value = json.loads(text)
            shapes = value["key"].items()
            value["key"] = {key: json.dumps(inner) for key, inner in shapes}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return text
        return json.dumps(value).encode()

    return mutate.of_json(samples).map(packed)


def is_whole(profile: _profile.Profile) -> bool:
    """Return whether everything in a profile has the type that plans rely on."""

    def ints(values: Any) -> bool:
        return isinstance(values, list) and all(type(v) is int for v in values)

    def pairs(values: Any) -> bool:
        return all(len(pair) == 2 and ints([*pair]) for pair in values)

    return (
        ints(profile.storages)
        and type(profile.compute_ns) is int
        and pairs(profile.outside)
        and all(
            isinstance(visit.block, str)
            and all(isinstance(name, str) for name in visit.names)
            and ints(visit.inputs)
            and ints(visit.ns)
            and ints(visit.flop)
            and pairs(visit.saves)
            for visit in profile.visits
        )
    )


def profile_run(data: bytes, folder: pathlib.Path) -> None:
    path = folder / _planner.FILE_NAME
    path.write_bytes(data)
    block = nn.ModuleDict({"l": nn.Linear(1, 1)})
    places = [
        types.SimpleNamespace(name="b", module=lambda: block),
        types.SimpleNamespace(name="gone", module=lambda: None),
    ]
    planner: Any = types.SimpleNamespace(
        path=str(path),
        key="key",
        shapes=_shapes.Shapes(),
        has_profile=False,
        activations=types.SimpleNamespace(places=places),
    )
    _planner.Planner._read(planner)
    for shape in planner.shapes:
        assert is_whole(shape.profile), "a profile with values of other types is taken"
        shape.profile.may_be_held_up()
    _planner.Planner._write(planner)


def request_make(folder: pathlib.Path) -> list[Any]:
    return [{"id": "0" * 32, "pid": os.getpid(), "out": [str(folder / "copy")]}]


def request_run(data: bytes, folder: pathlib.Path) -> None:
    (folder / _requests.REQUEST).write_bytes(data)
    session: Any = types.SimpleNamespace(directories=[str(folder)], closed=True)
    with mock.patch.object(os, "unlink", side_effect=PermissionError(errno.EPERM, "no")):
        assert _requests._taken(str(folder / _requests.REQUEST)) is None
    _requests.answer(session, str(folder))
    assert _requests._taken(str(folder / _requests.REQUEST)) is None
    assert not (folder / _requests.REQUEST).exists()
    for path in folder.glob(_requests.ANSWER + "*"):
        assert json.loads(path.read_text())["state"] == "failed"
        path.unlink()


def answer_make(folder: pathlib.Path) -> list[Any]:
    said = {"pid": 7, "step": 3, "done_bytes": 5, "total_bytes": 9, "message": "no", "errno": 28}
    states = (("done", ""), ("failed", "StoreError"), ("failed", "ModelError"), ("copying", ""))
    return [{**said, "state": state, "error": error} for state, error in states]


def answer_run(data: bytes, folder: pathlib.Path) -> None:
    path = folder / (_requests.ANSWER + "0" * 32)
    path.write_bytes(data)
    if _requests._get(str(path)) is None:
        refuses(lambda: _requests._await(str(path), os.getpid(), -1.0, None))
    told: list[tuple[int, int]] = []
    made = _requests._await(
        str(path), dead_process(), 0.0, lambda done, of: told.append((done, of))
    )
    assert type(made["step"]) is int and type(made["total_bytes"]) is int
    assert all(type(number) is int for pair in told for number in pair)


_dead: list[int] = []


def dead_process() -> int:
    """The number of a process that has ended."""
    if not _dead:
        process = subprocess.Popen(["true"])
        process.wait()
        _dead.append(process.pid)
    return _dead[0]


def checkpoint_make(folder: pathlib.Path) -> list[bytes]:
    made = []
    for state in ({"lohan": {"store": "x", "step": 3}}, {"state": {}}, [1]):
        path = folder / "sample.pt"
        torch.save(state, path)
        made.append(path.read_bytes())
    return made


def checkpoint_run(data: bytes, folder: pathlib.Path) -> None:
    path = folder / _trainer_folders.OPTIMIZER_NAME
    path.unlink(missing_ok=True)
    assert _trainer_folders.reference_of(folder) is None
    path.write_bytes(data)
    found = _trainer_folders.reference_of(folder)
    assert found is None or isinstance(found, dict)


# --- What a store carries ------------------------------------------------------------------------


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, bias=False))


def layout_of(model: nn.Module) -> _block.Layout:
    """Return the layout that lohan.wrap() makes of a model."""
    units = []
    params: list[_block.Param] = []
    for index, (name, module) in enumerate(model.named_children()):
        unit = _block.Unit(name, torch.float32, True, [])
        for key, tensor in module.named_parameters():
            param = _block.Param(f"{name}.{key}", tensor, index, 0, len(params))
            unit.params.append(param)
            params.append(param)
        _block.place(unit)
        units.append(unit)
    return _block.Layout(params, units, [])


class FakeStore:
    """A store with the given description, whose extents are zeros."""

    def __init__(self, meta: bytes, folder: pathlib.Path, *, is_empty: bool = False) -> None:
        self.is_short = False
        self._said = {
            "meta": meta,
            "is_empty": is_empty,
            "is_single_slot": False,
            "step": 1,
            "uuid": UUID.hex(),
            "note": "",
            "files": [(str(folder / "lohan.data"), 1, 1)],
            "commit_bytes": 1,
            "extent_count": 1,
            "caller_scalars": b"",
        }

    def describe(self) -> dict[str, Any]:
        return self._said

    def read(self, extent: int, offset: int, address: int, nbytes: int) -> None:
        pass

    def extents(self) -> list[tuple[int, int, int, bool]]:
        layout = layout_of(tiny())
        try:
            layout = _contents._parse(_meta.of(self)).layout  # type: ignore[arg-type]
        except LohanError:
            pass
        rows = [(nbytes, 0, 0, True) for nbytes, _ in _store.plan_extents(layout, False).table]
        return rows[1:] if self.is_short else rows

    def close(self) -> None:
        pass


def zeroth_layout() -> _block.Layout:
    """Return the layout that lohan.wrap(method="mezo") makes of a model."""
    layout = layout_of(tiny())
    for unit in layout.units:
        unit.trainable = False
        unit.params[0].stream = 0
        _block.place(unit)
    layout.method = {
        "name": "mezo",
        "lr": 0.1,
        "weight_decay": 0.0,
        **{"streams": [0, None, 1], "decays": [True, False, True], "kept": [None] * 3},
        **{"write_every": None, "storage": None},
    }
    return layout


def meta_make(folder: pathlib.Path) -> list[Any]:
    layout = layout_of(tiny())
    made = json.loads(json.dumps(_store.describe(layout)))
    frozen = json.loads(json.dumps(made))
    for row in frozen["params"]:
        row[3] = False
    other = {**made, "params": [*made["params"][:2], ["1.weight", [4, 2], "torch.float32", True]]}
    zeroth = json.loads(json.dumps(_store.describe(zeroth_layout())))
    zeroth["firsts"] = [0, 64, 0]
    places = {**frozen, "extents": [[0], [1]]}
    params, units = made["params"], made["units"]
    short = {**made, "params": params[:2], "units": units[:1]}
    rows = [[units[0][0], 1, *units[0][2:]], [units[1][0], 2, *units[0][2:]]]
    turned = {**made, "units": rows}
    again = {**made, "units": [[units[0][0] + "x", *units[0][1:]], units[1]]}
    renamed = {**again, "params": [["0.other", *params[0][1:]], *params[1:]]}
    swapped = {**made, "params": [params[1], params[0], params[2]]}
    version = {**made, "lohan": 3 - made["lohan"]}
    narrow = {**zeroth, "method": {**zeroth["method"], "kept": ["bf16", "bf16", None]}}
    return [
        *(made, frozen, zeroth, other, places, short, turned, again, renamed),
        *(swapped, version, narrow),
    ]


def meta_run(data: bytes, folder: pathlib.Path) -> None:
    store: Any = FakeStore(data, folder)
    cut: Any = FakeStore(data, folder)
    cut.is_short = True
    empty: Any = FakeStore(data, folder, is_empty=True)
    refuses(lambda: _same.check_same_model(empty, layout_of(tiny())))
    refuses(lambda: _contents.read(empty, str(folder)))
    if not (folder / _journal.NAME).exists():
        _journal.Journal.create(folder, UUID, Rule(7, 1e-3, 1)).close()
    before = _inspect.open_to_read
    _inspect.open_to_read = lambda *arguments: store  # type: ignore[assignment]
    wrong = None
    try:
        for reader in (
            lambda: _same.check_same_model(store, layout_of(tiny())),
            lambda: _same.check_same_model(store, zeroth_layout()),
            lambda: _inspect.describe([str(folder)]),
            lambda: _contents.read(store, str(folder)),
            lambda: _contents.read(cut, str(folder)),
        ):
            try:
                reader()
            except LohanError as error:
                wrong = error
    finally:
        _inspect.open_to_read = before
    if wrong is not None:
        raise wrong


def scalars_make(folder: pathlib.Path) -> list[bytes]:
    state = {"groups": [[0.1, 0.9, 0.99, 1e-8, 0.0]], "wrapped": [{}], "rng": "AAAA"}
    text = json.dumps({**state, "buffers": [["mean", "float32", [2]], ["n", "int64", []]]})
    return [json.dumps(state).encode(), text.encode() + b"\n" + bytes(16), b""]


def scalars_run(data: bytes, folder: pathlib.Path) -> None:
    state, kept = _scalars.parse(data)
    assert isinstance(state, dict)
    assert all(isinstance(value, torch.Tensor) for value in kept.values())


# --- What people write ---------------------------------------------------------------------------


def machine_make(folder: pathlib.Path) -> list[bytes]:
    presets = pathlib.Path(lohan.__file__).parent / "machines"
    return [path.read_bytes() for path in sorted(presets.glob("*.toml"))]


def machine_run(data: bytes, folder: pathlib.Path) -> None:
    path = folder / "machine.toml"
    path.write_bytes(data)
    machine = _machines.load(str(path))
    assert machine.ssd_count >= 1 and machine.worker_count >= 1


def trace_make(folder: pathlib.Path) -> list[Any]:
    path = folder / "trace.json"
    spans = [
        Span("training thread", 0, name, -1, step, at, at + 1000, 0)
        for step, at in ((1, 0), (2, 4000))
        for name in ("forward", "backward", "step")
    ]
    spans += [Span("SSD writes", 0, "block", 0, 1, 10, 500, 4096)]
    write_perfetto(path, spans, {"lohan": 1, "threads": 2})
    return [json.loads(path.read_text())]


def trace_run(data: bytes, folder: pathlib.Path) -> None:
    path = folder / "read.json"
    path.unlink(missing_ok=True)
    if data:
        path.write_bytes(data)
    spans, threads = _trace.load(path)
    for row in _trace.summarise(spans, threads):
        assert row["wall_ns"] > 0


TARGETS = [
    Target(
        "journal",
        journal_make,
        journal_run,
        (_journal._read, _journal._is_good, _journal._all_of, _journal.read),
        is_json=False,
        strategy=journal_changes,
    ),
    Target(
        "safetensors",
        weights_make,
        weights_run,
        (
            _files.read_header,
            _files._check_entry,
            _files._are_sizes,
            _files._once,
            _files._entry,
        ),
        is_json=False,
        strategy=weights_changes,
    ),
    Target("gguf", gguf_files.make, gguf_files.run, gguf_files.FUNCTIONS, is_json=False),
    Target("index", index_make, index_run, (_index.of_index, _files.read_folder)),
    Target(
        "profile",
        profile_make,
        profile_run,
        (_planner.Planner._read, _profile.Profile.from_json),
        is_cache=True,
        strategy=profile_changes,
    ),
    Target(
        "request",
        request_make,
        request_run,
        (_requests._taken, _requests._take, _requests.answer),
    ),
    Target(
        "answer",
        answer_make,
        answer_run,
        (_requests._get, _requests._await, _requests._check_answer, _requests._result),
    ),
    Target(
        "checkpoint",
        checkpoint_make,
        checkpoint_run,
        (_trainer_folders.reference_of,),
        is_json=False,
    ),
    Target(
        "meta",
        meta_make,
        meta_run,
        (
            _meta.parse,
            _contents._parse,
            _contents._check_table,
            _contents.read,
            _inspect._params,
            _same.check_same_model,
        ),
    ),
    Target(
        "scalars-py",
        scalars_make,
        scalars_run,
        (_scalars.parse, _buffers.unpack),
        is_json=False,
    ),
    Target(
        "machine",
        machine_make,
        machine_run,
        (_machines._parse, _machines._field, _units.quantity, _units.parse),
        is_json=False,
    ),
    Target("trace", trace_make, trace_run, (_trace.load,)),
    Target("steps", *steps_files.PARTS, is_cache=True, strategy=steps_files.changes),
]
assert _safetensors.NAMES  # the samples' dtypes need these names
