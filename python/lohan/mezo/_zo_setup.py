"""The arguments of `lohan.wrap(method="mezo")`, and the run that a store and journal record.

[Note: Lag] Each time a block that was written k steps ago is read, k steps are replayed on it. With
a write every K steps the lag is (K - 1) / 2 on average, and a step costs, for each element that
does not stay in memory,

    (K - 1) / 2 * z  +  (b / w + b / r) / K       seconds

where z is the time to replay one step on the element, b the bytes of its stored form (4 in fp32),
and w and r are the bytes that the SSDs write and read per second. The sum is smallest at
K = sqrt(2 (b / w + b / r) / z).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan import _core
from lohan.common import _durable, _log, _meta, _storage_formats
from lohan.common._storage_formats import TYPES
from lohan.config import Config
from lohan.errors import ModelError, StoreError, StoreMismatchError, UnsupportedError, store_error
from lohan.journal import _journal
from lohan.journal._journal import Journal
from lohan.journal._zeroth import Record, Rule, kept_operations, operations
from lohan.journal._zo_run import PASS_POSITIONS, check_base, uuid_of
from lohan.layout._in_place import Found
from lohan.mezo import _zo_device, _zo_replicas
from lohan.mezo._zo_optim import DECAY, LR, ZerothOptimizer
from lohan.store import _store
from lohan.torch_glue import _device

if TYPE_CHECKING:
    from lohan.layout._block import Layout
    from lohan.layout._experts import Apart
    from lohan.world._world import World

RNGS = ("philox", "torch")
EPS = 1e-3
_SEEDS = 1 << 64
_SAMPLES_MAX = 1 << 16


@dataclasses.dataclass
class Zeroth:
    """The settings of a zeroth-order run, which wrap() passes to the session.

    Attributes:
        moved: the parameters that the run trains. They require no gradient during the run.
        streams: the index of each trained parameter in the model, by its id. z is derived from it.
        firsts: the first element of experts' parts of a parameter, by the ids of the parts.
        last: the step that a resumed run goes back to; None: its last.
        rule: the rule that the arguments of wrap() define; after resume(), the journal's rule.
        asked: the arguments of wrap(), with None for each one that was not given.
        device: "cpu", "emu" or "cuda".
        write_every: steps between writes of the parameters; None if they are never written.
        storage: the format that parameters are stored in; None for their own dtype.
        names: the names of the trained parameters, by their ids.
        journal: the open journal; None until begin() or resume().
        world: the processes of the run; None if there is only one.
        run: the identifier of a new run of several processes, else None.
    """

    moved: list[nn.Parameter]
    streams: dict[int, int]
    rule: Rule
    asked: dict[str, Any]
    device: str = "cpu"
    write_every: int | None = None
    storage: str | None = None
    names: dict[int, str] = dataclasses.field(default_factory=dict)
    journal: Journal | None = None
    world: World | None = None
    run: str | None = None
    firsts: dict[int, int] = dataclasses.field(default_factory=dict)
    last: int | None = None

    def split(self, apart: Apart) -> None:
        """Train the experts' parts of parameters that were split, each with its part of z."""
        for whole, parts in apart.wholes():
            stream = self.streams.pop(id(whole), None)
            if stream is None:
                continue
            name = self.names.pop(id(whole))
            at = next(i for i, param in enumerate(self.moved) if param is whole)
            self.moved[at : at + 1] = parts
            for number, part in enumerate(parts):
                self.streams[id(part)] = stream
                self.firsts[id(part)] = number * part.numel()
                self.names[id(part)] = name

    def optimizer(self, layout: Layout, params: Iterable[dict[str, Any]] | None) -> ZerothOptimizer:
        """Create the optimizer, and describe the method and its parameters in the layout."""
        lr, decay = (
            float(start if self.asked[name] is None else self.asked[name])
            for name, start in (("lr", LR), ("weight_decay", DECAY))
        )
        groups: list[Any] = [{"params": self.moved}]
        if params is not None:
            groups = [dict(g) if isinstance(g, dict) else {"params": [g]} for g in params]
        made = ZerothOptimizer(groups, lr, decay)
        decays = made.decays()
        if set(decays) != set(self.streams):
            raise ModelError(
                f"params= has {len(decays)} parameters, but {len(self.streams)} parameters of the"
                " model require a gradient. Zeroth-order training changes all of these: pass"
                " exactly these in params=, or freeze the others with requires_grad_(False)"
            )
        for param in layout.params:
            param.stream = self.streams.get(id(param.tensor))
            param.decays = decays.get(id(param.tensor), True)
            param.z_first = self.firsts.get(id(param.tensor), 0)
        layout.method = {
            "name": "mezo",
            "lr": lr,
            "weight_decay": decay,
            "write_every": self.write_every,
            "storage": self.storage,
            "streams": [param.stream for param in layout.params],
            "decays": [param.decays for param in layout.params],
            "kept": [param.kept for param in layout.params],
            **({"firsts": [param.z_first for param in layout.params]} if self.firsts else {}),
            **({} if self.run is None else {"run": self.run}),
        }
        return made

    def begin(self, directories: Sequence[str], store: _core.Store) -> None:
        """Start a new run. Its journal is created before any weight is written."""
        self.journal = Journal.create(directories[0], uuid_of(store), self.rule)

    def go_back(self, directories: Sequence[str], config: Config, step: int) -> int:
        """Let resume() go back to a step.

        Returns:
            The step to open the store at: the last one of those whose parameters it has, from
            which the journal leads to the step.

        Raises:
            StoreError: the store has no parameters from which the journal leads to the step, or it
                cannot be opened.
        """
        store = _store.open_existing(directories, config, read_only=True)
        said = store.describe()
        store.close()
        written = sorted({int(said["older_step"]), int(said["step"])})
        found = [each for each in written if each <= step]
        if not found:
            raise StoreError(
                errno.EINVAL,
                f"{directories[0]} cannot go back to step {step}: it has the parameters of"
                f" {' and '.join(f'step {each}' for each in written)}, and its journal leads from"
                f" there to later steps only. resume_step= takes a step from {written[0]} on",
            )
        self.last = step
        return found[-1]

    def resume(self, directories: Sequence[str], store: _core.Store) -> None:
        """Open the journal of a run to resume it, and adopt the journal's rule.

        Raises:
            StoreError: the run does not have the step to go back to.
            StoreMismatchError: wrap() got a different rule, or the journal is an old copy.
        """
        self.journal = Journal.open(_journal.place(directories), uuid_of(store))
        if self.world is not None:
            _zo_replicas.level(self.world, self.journal)
        else:
            _zo_replicas.level_alone(self.journal, directories, store)
        check_base(directories, len(self.journal.records), store)
        then = self.journal.rule
        for name, value, was in (
            ("eps", self.asked["eps"], then.eps),
            ("seed", self.asked["seed"], then.seed),
            ("num_samples", self.asked["num_samples"], then.samples),
            ("rng", self.asked["rng"], then.rng),
        ):
            if value is not None and value != was:
                raise StoreMismatchError(
                    f"{name}={value!r}, but the run in the store has {name}={was!r}, which cannot"
                    " be changed on resume: leave it out, or start a new store"
                )
        _zo_device.check(self.device, then.rng)
        self.rule = then
        was_every = _meta.of(store)["method"]["write_every"]
        every = self.asked["write_every"]
        if was_every is None and isinstance(every, int):
            raise StoreMismatchError(
                f'write_every={every}, but the store was created with "never" and has no room to'
                " write parameters: leave it out, or start a new store"
            )
        self.write_every = was_every if every == "auto" else None if every == "never" else every
        self._cut(directories, store)

    def _cut(self, directories: Sequence[str], store: _core.Store) -> None:
        """Remove the steps after the one to go back to from the journal, which is open."""
        assert self.journal is not None
        count, last = len(self.journal.records), self.last
        if last is None or last == count:
            return
        if last > count:
            raise StoreError(
                errno.EINVAL,
                f"{directories[0]} cannot be opened at step {last}: the last step of its journal"
                f" is {count}",
            )
        self.journal.close()
        _, kept = _journal.cut(directories, uuid_of(store), last)
        self.journal = Journal.open(_journal.place(directories), uuid_of(store))
        _log.note(
            f"the run goes back from step {count} to step {last}; its previous journal is kept as"
            f" {kept}"
        )

    def keep_storage(self, meta: dict[str, Any]) -> None:
        """Adopt the storage format of the store that is resumed.

        Raises:
            StoreMismatchError: wrap() got a different format.
        """
        was = (meta.get("method") or {}).get("storage")
        now = [_storage_formats.format_of(param.dtype, self.storage) for param in self.moved]
        then = [_storage_formats.format_of(param.dtype, was) for param in self.moved]
        if self.storage is not None and now != then:
            raise StoreMismatchError(
                f"storage={self.storage!r}, but the run in the store has storage={was!r}, and its"
                " steps were rounded to that format: leave it out, or start a new store"
            )
        self.storage = was

    def memory_bytes(self, param: nn.Parameter) -> int:
        """Return the bytes that a parameter of the model occupies in main memory."""
        kept = (
            _storage_formats.format_of(param.dtype, self.storage)
            if id(param) in self.streams
            else None
        )
        if kept is None:
            return param.numel() * param.element_size()
        values = param.element_size() if self.device == "cpu" else 0
        return param.numel() * (_storage_formats.TYPES[kept].itemsize + values)

    def is_converted(self, dtype: torch.dtype) -> bool:
        """Return whether parameters of this dtype are stored in a different dtype."""
        kept = _storage_formats.format_of(dtype, self.storage)
        return kept is not None and _storage_formats.TYPES[kept] != dtype

    def freeze(self) -> Callable[[], None]:
        """Freeze the trained parameters, so that no activations are saved for a backward.

        Returns:
            A function that undoes it.
        """
        moved = [*self.moved]  # without split()

        def thaw() -> None:
            for param in moved:
                param.requires_grad_(True)

        for param in moved:
            param.requires_grad_(False)
        return thaw

    def close(self, *, is_lost: bool) -> None:
        """Close the journal after an error, and delete it if is_lost."""
        journal, self.journal = self.journal, None
        if journal is None:
            return
        journal.close()
        if is_lost:
            with contextlib.suppress(OSError):
                os.unlink(journal.path)


def find(zeroth: Zeroth, found: Found | None, then: dict[str, Any] | None) -> Found | None:
    """Return, for make_layout, which parameters are trained and which are read from files.

    Args:
        zeroth: the run.
        found: the parameters that were found in weight files.
        then: the metadata of the store that is resumed; None for a new store.

    Raises:
        StoreMismatchError: the store's format is not the one that was passed to wrap().
        UnsupportedError: the device does not support the store's format.
    """
    resume = then is not None
    made = found if found is not None else Found([], {}, set())
    made.moved = frozenset(zeroth.streams)
    if then is not None:
        zeroth.keep_storage(then)
        _check_storage(zeroth)
    made.storage = zeroth.storage
    if found is not None and not resume:
        ids = {id(param): param.dtype for param in zeroth.moved}
        made.in_place -= {key for key, dtype in ids.items() if zeroth.is_converted(dtype)}
        made.file_count *= bool(made.in_place)
    if found is not None and not resume:
        # A moved parameter is advanced in place, from bytes that are read as they are.
        packed = {key for key, entry in found.entries.items() if entry.packed is not None}
        made.in_place -= packed & made.moved
        made.file_count *= bool(made.in_place)
    if zeroth.write_every is not None and not resume:
        made.in_place -= made.moved
        made.file_count *= bool(made.in_place)
    return made


def check(asked: dict[str, Any]) -> None:
    """Reject invalid arguments of wrap(method="mezo").

    Args:
        asked: eps, seed, num_samples, rng and storage; None for those not given.

    Raises:
        ModelError: names the argument, and what is valid.
    """
    eps, seed, samples = (asked[name] for name in ("eps", "seed", "num_samples"))
    if eps is not None and not 0 < float(eps) < float("inf"):
        raise ModelError(f"eps {float(eps)} must be a finite number above 0")
    if seed is not None and not (type(seed) is int and 0 <= seed < _SEEDS):
        raise ModelError(f"seed {seed!r} must be a whole number from 0 to 2^64 - 1")
    if samples is not None and not (type(samples) is int and 0 < samples < _SAMPLES_MAX):
        raise ModelError(
            f"num_samples {samples!r} must be a whole number from 1 to {_SAMPLES_MAX - 1}"
        )
    if asked["rng"] is not None and asked["rng"] not in RNGS:
        raise ModelError(f"rng {asked['rng']!r} must be one of {', '.join(RNGS)}")
    if asked["storage"] is not None and asked["storage"] not in _storage_formats.TYPES:
        raise ModelError(
            f"storage {asked['storage']!r} must be one of {', '.join(_storage_formats.TYPES)}"
        )


def make(model: nn.Module, asked: dict[str, Any], config: Config, store: Any) -> Zeroth:
    """Return the run of a call of wrap().

    Args:
        model: the model to wrap.
        asked: lr, betas, eps, weight_decay, and what check() takes.
        config: the session's settings.
        store: the store's directories as passed to wrap(); None for a temporary one.

    Raises:
        ModelError: a parameter has an unsupported dtype, or no parameter is trained.
        UnsupportedError: the device does not support the generator or the format.
    """
    moved, streams = _moved(model)
    eps = EPS if asked["eps"] is None else float(asked["eps"])
    seed = torch.initial_seed() % _SEEDS if asked["seed"] is None else asked["seed"]
    samples = 1 if asked["num_samples"] is None else asked["num_samples"]
    rng = asked["rng"] or RNGS[0]
    device = _device.parse(config.device)[0]
    _zo_device.check(device, rng)
    asked = {**asked, "write_every": config.write_every}
    made = Zeroth(moved, streams, Rule(seed, eps, samples, rng), asked, device)
    made.storage = asked["storage"]
    made.names = {id(param): name for name, param in model.named_parameters()}
    _check_storage(made)
    made.write_every = _every(made, model, config, store)
    return made


def _every(made: Zeroth, model: nn.Module, config: Config, store: Any) -> int | None:
    if config.write_every == "never":
        return None
    if isinstance(config.write_every, int):
        return config.write_every
    if fits(config, sum(made.memory_bytes(p) for p in model.parameters())):
        return None
    if made.rule.rng == "torch":
        return 1  # redrawing z takes longer than any SSD takes to write
    names = [] if store is None else [store] if isinstance(store, str | os.PathLike) else [*store]
    most = max(made.moved, key=torch.Tensor.numel)
    kept = _storage_formats.format_of(most.dtype, made.storage)
    return measured_every(config, [os.path.expanduser(os.fspath(n)) for n in names], kept)


def _check_storage(made: Zeroth) -> None:
    """Reject a format that this run's parameters cannot be stored in."""
    kept = [p for p in made.moved if _storage_formats.format_of(p.dtype, made.storage) is not None]
    if not kept:
        return
    what = f"{made.names[id(kept[0])]!r} ({kept[0].dtype}"
    what += f", storage={made.storage!r})" if made.storage else ")"
    if made.rule.rng == "torch":
        raise UnsupportedError(
            f'rng="torch" reproduces MeZO\'s own code, which is float32 only, but parameter {what}'
            ' is not both stored and computed in float32: use rng="philox", or call model.float()'
            " before lohan.wrap() and leave out storage="
        )
    _zo_device.check_kept(made.device, [p.dtype for p in kept], made.storage, what)
    most = _zo_device.KEPT_SAMPLES_MAX if made.device == "cuda" else PASS_POSITIONS - 2
    if made.rule.samples > most:
        raise UnsupportedError(
            f"num_samples {made.rule.samples} is too large: a step can have {most} at most unless"
            f" all parameters are both stored and computed in float32, and {what} is not"
        )


def _moved(model: nn.Module) -> tuple[list[nn.Parameter], dict[int, int]]:
    moved: list[nn.Parameter] = []
    streams: dict[int, int] = {}
    for number, (name, param) in enumerate(model.named_parameters()):
        if not param.requires_grad or param.numel() == 0:
            continue
        if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ModelError(
                f'parameter {name!r} is {param.dtype}, but method="mezo" supports float32, bfloat16'
                " and float16: convert it before lohan.wrap(), or freeze it with"
                " requires_grad_(False)"
            )
        moved.append(param)
        streams[id(param)] = number
    if not moved:
        raise ModelError(
            "no parameter of the model requires a gradient, so there is nothing to train: call"
            " requires_grad_(True) on those to train"
        )
    return moved, streams


EVERY_MAX = 1024
# The memory needed for all parameters, relative to their bytes. This estimate is conservative.
_FIT = 1.1
_MEASURE_BYTES = 64 << 20
_MEASURE_ELEMENTS = 1 << 19
_ASSUMED = (1e9, 2e9)  # write and read bytes per second for a store without a directory yet


def fits(config: Config, nbytes: int) -> bool:
    """Return whether nbytes of parameters stay in main memory once they are loaded."""
    limit = config.host_bytes
    if limit is None:
        limit = int(_core.build_info()["memory_available_bytes"]) // 2
    return nbytes * _FIT + (16 << 20) <= limit


def best_every(
    z_seconds: float, write_bytes_per_s: float, read_bytes_per_s: float, element_bytes: int = 4
) -> int:
    """Return the best K of [Note: Lag].

    Args:
        z_seconds: the time to replay one step on one element.
        write_bytes_per_s: the write rate of the SSDs.
        read_bytes_per_s: the read rate of the SSDs.
        element_bytes: the bytes of an element's stored form.
    """
    moved = element_bytes / write_bytes_per_s + element_bytes / read_bytes_per_s
    return min(max(round(math.sqrt(2 * moved / z_seconds)), 1), EVERY_MAX)


def measured_every(config: Config, directories: Sequence[str], kept: str | None) -> int:
    """Return K for this machine and these directories, after measurements of half a second.

    Args:
        config: the session's settings.
        directories: the store's directories; empty for a temporary store.
        kept: the format of the parameters' stored form, from _storage_formats.format_of().
    """
    threads = config.threads or len(os.sched_getaffinity(0))
    writes, reads = _ASSUMED
    if directories:
        pairs = []
        for directory in directories:
            _durable.make_directory(directory, mode=0o700)
            pairs.append(_core.store_measure(store_error, directory, _MEASURE_BYTES))
        writes = max(sum(float(write) for write, _ in pairs), 1.0)
        reads = max(sum(float(read) for _, read in pairs), 1.0)
    element_bytes = 4 if kept is None else TYPES[kept].itemsize
    return best_every(_z_seconds(kept) / threads, writes, reads, element_bytes)


def _z_seconds(kept: str | None) -> float:
    values = torch.zeros(_MEASURE_ELEMENTS)
    state = values.to(torch.float32 if kept is None else TYPES[kept])
    at, count = values.data_ptr(), values.numel()
    rule, records = Rule(0, 1e-3), [Record(0.0, 0.0, (0.0,))]
    make = operations if kept is None else kept_operations
    ops = [*make(rule, records, 0, 0, rule.step_length)]
    best = math.inf
    for _ in range(3):
        begin = time.perf_counter()
        if kept is None:
            _core.zo_apply(at, at, 0, count, ops)
        else:
            _core.zo_lead(state.data_ptr(), kept, at, "fp32", 0, count, ops)
        best = min(best, time.perf_counter() - begin)
    return best / count
