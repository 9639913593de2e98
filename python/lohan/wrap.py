"""`lohan.wrap`: the one call that a training script needs."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lohan import _core
from lohan.activations import _activations, _swap
from lohan.activations._planner import Planner
from lohan.common import _arguments, _exit
from lohan.config import SCHEDULES_AT_STEP, Config
from lohan.errors import (
    ModelError,
    OffloadedGradientError,
    StoreError,
)
from lohan.layout import _in_place
from lohan.mezo import _zo_setup
from lohan.mezo._zo_session import ZerothSession
from lohan.session import _adopt, _division, _notes, _settings
from lohan.session._guard import Guard
from lohan.session._model_checks import check_model
from lohan.session._optim import DEFAULTS, Optimizer, StoreOptimizer
from lohan.session._session import Session
from lohan.store import _export, _store, _weights
from lohan.store._scalars import with_buffers
from lohan.torch_glue import _buffers, _device
from lohan.torch_glue._accumulate import is_accumulating

if TYPE_CHECKING:
    from lohan.layout._block import Layout
    from lohan.layout._in_place import Found
    from lohan.mezo._zo_setup import Zeroth

PathLike = str | os.PathLike[str]


@_arguments.keywords_only
def wrap(
    model: nn.Module,
    *,
    store: PathLike | Sequence[PathLike] | None = None,
    resume: bool | int = False,
    lr: float | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    max_grad_norm: float | None = None,
    params: Iterable[dict[str, Any]] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    blocks: Sequence[nn.Module] | None = None,
    weights: PathLike | None = None,
    init: str | Callable[[nn.Module], None] | None = None,
    method: str = "adamw",
    config: Config | None = None,
    **settings: Any,
) -> nn.Module:
    """Train model with its parameters, master copies and Adam moments on SSD.

    They are in memory only while a block that needs them runs. The numbers are those of fp32 AdamW.

    Args:
        model: any module with floating-point parameters on the CPU, fp32, bf16 or fp16 where they
            require a gradient; or one made in `lohan.empty()`, with weights=, init= or resume=.
        store: a directory, or one a disk. None: a temporary store, gone at exit.
        resume: True resumes the last committed step, a number that step (docs/checkpoints.md).
        lr: learning rate of groups that do not say otherwise. None: 1e-3.
        betas: decay of the moments. None: (0.9, 0.999).
        eps: added to the root of the second moment. None: 1e-8.
        weight_decay: decoupled weight decay. None: 1e-2.
        max_grad_norm: of all gradients (in fp64), as torch.nn.utils.clip_grad_norm_ has it, and
            `model.optimizer.grad_norm` is what it was. Schedule "deferred" (or "auto"), "serial".
        params: parameter groups as for torch.optim.AdamW; None: all parameters in one group.
        optimizer: a torch.optim.AdamW, or Adam, to go on from instead of lr to params. It is
            emptied; its scheduler works on. With resume it gives groups, the store the rest.
        blocks: modules to be blocks; None: found by structure.
        weights: a folder or file of safetensors to fill it from; frozen parameters are read there.
        init: "model" for the model's own initialisation, or a function of a module with parameters.
        method: "mezo": zeroth-order, by `model.zo_step(closure)`: docs/zeroth-order.md.
        config: settings that do not change the numbers.
        **settings: fields of Config by name (host_bytes=, io=, commit_every=, ...).

    Returns:
        The same module, with `model.optimizer` (a torch.optim one) and `model.lohan`, its session.

    Raises:
        ModelError: not a module, no parameters, unsupported dtype or layout: which, and why.
        BudgetError, StoreError: host_bytes is too small; the store cannot be made or opened.
        UnsupportedError: distributed training, a model that is compiled or wrapped already.

    Reference:
        LoHan IV-E (interface), IV-C (active gradient offloading); ZO2 alg. 1 ("mezo").
    """
    hyper = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    _arguments.check(model, hyper, store, resume, max_grad_norm, blocks, weights, config)
    of_method = _zo_setup.take(settings, max_grad_norm, optimizer)
    made = _settings.make(config, settings, wrap)
    resume, open_at = _store.resume_asked(resume)
    check_model(model, resume or weights is not None or init is not None)
    zeroth = _zo_setup.make(method, model, {**hyper, **of_method}, made, store)
    _adopt.check(optimizer, {**hyper, "params": params}, resume=resume)
    made = _checked_config(made, max_grad_norm)
    with _zo_setup.frozen(zeroth):
        found, rows = _find(zeroth, model, made, store, resume, weights, open_at)
        made, layout, budget = _division.divide(model, blocks, made, found, rows)
        ours, group_of = _make_optimizer(layout, params, hyper, optimizer, zeroth, max_grad_norm)
        opening = _Opening(model, layout, made, budget, ours, group_of, found, zeroth, open_at)
        return opening.attach(store, resume, weights, init)


@dataclasses.dataclass
class _Opening:
    """What a session is made from, on its way."""

    model: nn.Module
    layout: Layout
    config: Config
    budget: dict[str, int]
    optimizer: Any  # Optimizer, or ZerothOptimizer
    group_of: dict[int, int]
    found: Found | None = None  # in the files of weights=
    zeroth: Zeroth | None = None
    open_at: int | None = None  # the step to resume; None: the last
    room: _core.Store | None = None  # of SSD, for activations; the session's once there is one
    was_in_memory: bool = False  # what is given back where wrapping fails
    session: Session | None = None

    def attach(
        self, where: PathLike | Sequence[PathLike] | None, resume: bool, weights: Any, init: Any
    ) -> nn.Module:
        """Open, and put the session on the model; a Ctrl-C on the way leaves no session open."""
        try:
            session = self.open(where, resume, weights, init)
            return _attach(self.model, session, self.optimizer, self)
        except BaseException:
            if self.session is not None:  # nobody else could close it
                _exit.close_quietly(self.session)
            raise

    def open(
        self, where: PathLike | Sequence[PathLike] | None, resume: bool, weights: Any, init: Any
    ) -> Session:
        """Make or open the store and begin a session on it; leave nothing behind on an error."""
        _activations.check_layers(self.config, self.layout)
        if resume and where is None:
            raise StoreError("resume=True needs store=: there is nothing to go on with")
        directories = directories_of(where)
        extents = _store.plan_extents(self.layout, self.config.commit_every == "never")
        try:
            # First: a disk that is full must not cost a store that is filled already.
            store_bytes = 0 if resume else extents.nbytes
            self.room = _swap.make_room(self.config, directories, store_bytes)
            if resume:
                store = _store.open_existing(directories, self.config, open_at=self.open_at)
            else:
                self.layout.about = _export.about(self.model, self.layout)
                _say_parents(directories)
                store = _store.create(
                    self.layout, extents, directories, self.config, temporary=where is None
                )
            return self._begin(store, extents, directories, resume, weights, init, where is None)
        except BaseException:
            if self.room is not None:
                self.room.close()
            raise
        finally:
            if where is None:
                for directory in directories:
                    _store.remove_temporary(directory)

    def _begin(
        self,
        store: _core.Store,
        extents: _store.Extents,
        directories: list[str],
        resume: bool,
        weights: Any,
        init: Any,
        temporary: bool,
    ) -> Session:
        """Fill a new store, or compare an old one, and start the engine."""
        is_filled = resume
        self.was_in_memory = not any(p.tensor.is_meta for p in self.layout.params)
        session: Session | None = None
        tensors = [param.tensor for param in self.layout.params]
        try:
            self.layout.in_place.open(self.config)
            if resume:
                self._compare(extents, store)
                if self.zeroth is not None:
                    self.zeroth.go_on(directories, store)
            else:
                if self.zeroth is not None:
                    self.zeroth.begin(directories, store)
                self._fill(extents, store, weights, init)
                is_filled = True
                _weights.drop(self.layout)  # not before: a failure must not cost the only copy
            params = zip(tensors, self.layout.params, strict=True)
            self.optimizer.rebind({id(old): param.tensor for old, param in params})
            self.session = session = self._session(extents, store, directories)
            session.adopt(self.optimizer)
            session.buffers = _store.buffers(self.model, self.layout, store)
            if resume:
                session.resumed_step = session.step
                session.restore_scalars()
        except BaseException as error:
            if is_filled and not resume and not temporary:
                error.add_note("the weights are in the store: wrap again with resume=True")
            if session is not None:
                _exit.close_quietly(session)
            else:
                if is_filled and not resume and self.was_in_memory:
                    _weights.recover(self.layout, extents, store)
                store.close()
                self.layout.in_place.close()
                if self.zeroth is not None:
                    self.zeroth.close(is_lost=not is_filled)
            if not is_filled and not temporary:
                _store.remove(directories)
            raise
        if temporary:
            print(
                f"lohan: temporary store of {extents.nbytes / 1e9:.2f} GB in {directories[0]}"
                " (gone at exit; pass store= to keep it)",
                file=sys.stderr,
            )
        _notes.say(session)
        _device.say_gpu(self.config)
        _buffers.say_rounded(self.model)
        return session

    def _session(
        self, extents: _store.Extents, store: _core.Store, directories: list[str]
    ) -> Session:
        make: Any = Session
        if self.zeroth is not None:
            make = functools.partial(ZerothSession, zeroth=self.zeroth)
        session: Session = make(
            self.layout,
            extents,
            store,
            self.config,
            self.budget,
            directories,
            self.group_of,
            len(self.optimizer.param_groups),
            norms=self.optimizer.max_grad_norm is not None or self.config.loss_scaling,
            device=_division.plan_device(self.layout, self.config),
            room=self.room,
        )
        return session

    def _compare(self, extents: _store.Extents, store: _core.Store) -> None:
        """The store is this model's, and the files that it reads in place are still the same."""
        _store.check_same_model(store, self.layout)
        _store.check_slots(store, self.config)
        _store.check_table(store, extents)
        _store.read_checksums(self.layout, extents, store)
        if self.found is not None:
            _in_place.check_content(self.layout, self.found.then)
        _weights.skip_fill(self.model, self.layout)

    def _fill(self, extents: _store.Extents, store: _core.Store, weights: Any, init: Any) -> None:
        scalars = b""
        if self.optimizer.origin is not None:
            origin = self.optimizer.origin
            scalars = _adopt.write_state(origin, self.layout, extents, store)
        files = self.found.files if self.found is not None else ()
        if self.found is not None:
            _weights.fill_buffers(self.found.buffers, files)
        buffers = _store.buffers(self.model, self.layout, store)
        scalars = with_buffers(scalars, b"", len(self.layout.params), buffers)
        _weights.fill(self.model, self.layout, extents, store, weights, init, scalars, files)


def unwrap(model: nn.Module) -> nn.Module:
    """Give a wrapped model its parameters back, in memory, and close its session.

    Args:
        model: a wrapped model whose parameters fit in memory. Where its session is closed, they
            are those of the store's last commit.

    Returns:
        The same module on the CPU, trainable by any optimizer again. Moments are left in the
        store; the optimizer that wrap(optimizer=) was given has its own back, as they are now.

    Raises:
        ModelError: the model is not wrapped.
        StoreError: its session is closed, and the store cannot be read.
    """
    session: Session | None = model.__dict__.get("lohan")
    guard: Guard | None = model.__dict__.get("_lohan_guard")
    if session is None or guard is None:
        raise ModelError("the model is not wrapped")
    origin: torch.optim.Optimizer | None = model.__dict__["optimizer"].origin
    layout, extents = session.layout, session.extents
    if not session.closed:
        session.settle()
        opened = session.exclusive([])
    else:
        opened = _store.reopened(session.directories, session.config, layout)
    with opened as store:
        states = _adopt.read_state(layout, extents, store) if origin is not None else {}
    values = session.values()
    session.close()
    _exit.sessions.discard(session)
    session.unhook()
    guard.remove()
    if origin is not None:
        _adopt.release(origin, layout, states)
    for param, value in zip(layout.params, values, strict=True):
        param.tensor.data = value
        if param.stream is not None:
            param.tensor.requires_grad_(True)
    session.device.give_buffers(model)
    _remove_attributes(model)
    return model


def _remove_attributes(model: nn.Module) -> None:
    for name in ("lohan", "optimizer", "no_sync", "zo_step", "_lohan_guard"):
        if name in model.__dict__:
            object.__delattr__(model, name)


def _attach(model: nn.Module, session: Session, optimizer: Any, opening: _Opening) -> nn.Module:
    """Put a session that is open on the model, or close it: its store is free again at once."""
    guard = Guard(model, session, _export.save_pretrained)
    try:
        _put_on(model, session, optimizer, guard)
    except BaseException:
        values: list[torch.Tensor] = []
        if opening.was_in_memory:
            with contextlib.suppress(Exception):
                values = session.values()
        _exit.close_quietly(session)
        session.unhook()
        guard.remove()
        _remove_attributes(model)
        for param, value in zip(session.layout.params, values, strict=False):
            param.tensor.data = value
        raise
    return model


def _put_on(model: nn.Module, session: Session, optimizer: Any, guard: Guard) -> None:
    if session.config.heap == "keep" and session.device.torch_device.type == "cpu":
        _core.heap_keep()
    session.hook(model, Planner)
    session.device.take_buffers(model)
    guard.install()
    object.__setattr__(model, "lohan", session)
    object.__setattr__(model, "optimizer", optimizer)
    object.__setattr__(model, "no_sync", session.no_sync)
    if isinstance(session, ZerothSession):
        object.__setattr__(model, "zo_step", session.step_of(model))
    object.__setattr__(model, "_lohan_guard", guard)
    weakref.finalize(model, _exit.close_quietly, session)
    _exit.sessions.add(session)
    if _exit.set_handlers():
        register_optimizer_step_pre_hook(_refuse_other_optimizer)
    if optimizer.origin is not None:
        _adopt.retire(optimizer.origin, session.layout)


def _refuse_other_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, StoreOptimizer):
        return
    for session in _exit.sessions:
        names = {} if session.closed else session.param_names()
        for param in itertools.chain(*(group["params"] for group in optimizer.param_groups)):
            if id(param) in names:
                raise OffloadedGradientError(
                    f"{type(optimizer).__name__} cannot step parameter {names[id(param)]!r}, whose"
                    " values and gradient are lohan's: use model.optimizer"
                )


def directories_of(store: PathLike | Sequence[PathLike] | None) -> list[str]:
    """The directories of a store as wrap() takes them; a temporary one for None."""
    return [_store.temporary_directory()] if store is None else _arguments.directories_of(store)


def _check_directories(directories: Sequence[str]) -> None:
    """Refuse a resume that names directories besides those that the store has."""
    found = [name for name in directories if (Path(name) / "lohan.data").exists()]
    others = [name for name in directories if name not in found]
    if found and others:
        raise StoreError(
            errno.ENOENT,
            f"{', '.join(found)} has a store or a part of one, and {', '.join(others)} has none:"
            " store= names exactly the directories that the store was made with. Mount a drive"
            " that is missing; lohan.snapshot() copies a store to another number of directories",
        )


def _say_parents(directories: Sequence[str]) -> None:
    """Say which file system a store is on where its parents are made on that of /.

    The drive that was to have it may not be mounted.
    """
    for name in directories:
        parent = Path(name).parent
        if parent.exists():
            continue
        while not parent.exists():
            parent = parent.parent
        if parent.stat().st_dev != os.stat("/").st_dev:
            continue
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        device = next((fields[0] for fields in reversed(mounts) if fields[1] == "/"), "?")
        print(
            f"lohan: {Path(name).parent} did not exist and is made: the store in {name} is on the"
            f" root file system ({device}, mounted at /). If it was to be on another drive, that"
            " one is not mounted",
            file=sys.stderr,
        )


def _checked_config(config: Config, max_grad_norm: float | None) -> Config:
    """The norm, and a sum of gradients, are known behind backward only: updates wait for them."""
    _settings.check(config)
    is_summed = is_accumulating(config.accumulate)
    is_waiting = is_summed or config.loss_scaling or max_grad_norm is not None
    if config.schedule in SCHEDULES_AT_STEP or not is_waiting:
        return config
    if max_grad_norm is not None and config.schedule not in (Config().schedule, "auto"):
        raise ModelError(
            f"schedule {config.schedule!r} updates before the norm of all gradients is known:"
            f" with max_grad_norm use {' or '.join(map(repr, SCHEDULES_AT_STEP))}"
        )
    return dataclasses.replace(config, schedule="deferred")


def _find(
    zeroth: Zeroth | None,
    model: nn.Module,
    config: Config,
    store: PathLike | Sequence[PathLike] | None,
    resume: bool,
    weights: PathLike | None,
    open_at: int | None,
) -> tuple[Found | None, list[Any]]:
    """What files have of the model: those of weights=, or those that the store goes on with.

    Returns:
        It, and the units of that store.
    """
    place = None if weights is None else Path(os.fspath(weights)).expanduser()
    if resume and store is not None:
        _check_directories(directories_of(store))
        meta = _store.read_meta(directories_of(store), config, open_at)
        found = _in_place.of_store(meta, model, place)
        return _zo_setup.find(zeroth, found, meta), meta.get("units", [])
    found = None if place is None else _in_place.of_folder(place, model, config)
    return _zo_setup.find(zeroth, found, None), []


def _make_optimizer(
    layout: Layout,
    params: Iterable[dict[str, Any]] | None,
    defaults: dict[str, Any],
    origin: torch.optim.Optimizer | None,
    zeroth: Zeroth | None,
    max_grad_norm: float | None,
) -> tuple[Any, dict[int, int]]:
    """The optimizer, and the group of each parameter."""
    if zeroth is not None:
        return zeroth.optimizer(layout, params), {}
    trainable = [p for p in layout.params if layout.units[p.unit].trainable]
    name = "params=" if origin is None else "optimizer="
    if origin is not None:
        groups = origin.param_groups
        defaults = {key: origin.defaults[key] for key in DEFAULTS}
    elif params is None:
        groups = [{"params": [p.tensor for p in trainable]}]
    else:
        groups = _arguments.groups_of(params)
    if not trainable and origin is None:
        groups = [{"params": []}]
    index = {id(p.tensor): p.index for p in layout.params}
    seen: set[int] = set()
    for group in groups:
        for tensor in group["params"]:
            if id(tensor) not in index:
                raise ModelError(
                    f"{name} has a tensor of shape {tuple(tensor.shape)} that is not a parameter of"
                    " the model: what is trained together is wrapped together, in one module"
                )
            if id(tensor) in seen:
                raise ModelError(
                    f"{name} has {layout.params[index[id(tensor)]].name!r} twice: name each"
                    " parameter once, in one group"
                )
            seen.add(id(tensor))
    given = {name: value for name, value in defaults.items() if value is not None}
    optimizer = Optimizer(groups or [{"params": []}], given)
    optimizer.max_grad_norm = max_grad_norm
    if origin is not None:
        optimizer.origin = origin
        _adopt.share_hooks(optimizer, origin)
    group_of = {
        index[id(tensor)]: number
        for number, group in enumerate(optimizer.param_groups)
        for tensor in group["params"]
    }
    left = [p.name for p in trainable if p.index not in group_of]
    if left:
        raise ModelError(
            f"{name} leaves out {len(left)} parameters that require a gradient ({left[0]!r}, ...):"
            " add them to a group, or freeze them"
        )
    return optimizer, group_of
