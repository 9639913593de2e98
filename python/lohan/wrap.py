"""`lohan.wrap` (LoHan IV-E, active gradient offloading: IV-C; "mezo": ZO2 alg. 1)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lohan import _core
from lohan.activations import _activations, _swap
from lohan.common import _arguments, _exit
from lohan.config import Config
from lohan.errors import ModelError, OffloadedGradientError, StoreError
from lohan.layout import _names, _ties
from lohan.mezo import _zo_setup, _zo_world
from lohan.session import (
    _division,
    _notes,
    _opened,
    _order,
    _replaced,
    _settings,
)
from lohan.session._guard import Guard
from lohan.session._model_checks import check_model
from lohan.session._optim import DEFAULTS, Optimizer, StoreOptimizer
from lohan.session._session import Session
from lohan.store import _checksums, _directories, _scalars, _store, _temporary, _weights
from lohan.store._created import remove_remains
from lohan.torch_glue import _buffers, _device, _late
from lohan.world._joined import joined

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
    resume: bool | int | str = False,
    lr: float | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    max_grad_norm: float | None = None,
    params: Iterable[dict[str, Any]] | Callable[[nn.Module], Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    blocks: Sequence[nn.Module] | None = None,
    weights: PathLike | None = None,
    init: str | Callable[[nn.Module], None] | None = None,
    method: str = "adamw",
    states: str = "fp32",
    groups: Mapping[str, Any] | None = None,
    experts: str = "together",
    idle: str = "exact",
    config: Config | None = None,
    **settings: Any,
) -> nn.Module:
    """Prepare a model for training as by fp32 AdamW, with its parameters and states on SSD.

    Args:
        model: a module with parameters on the CPU (fp32, bf16 or fp16), or of `lohan.empty()`.
        store: a directory, or a list of one per disk. None: a temporary store, removed at exit.
        resume: True to resume the last committed step, or "step N" (docs/checkpoints.md).
        lr: learning rate of groups that do not set their own. None: 1e-3.
        betas: decay rates of the moments. None: (0.9, 0.999).
        eps: added to the root of the second moment. None: 1e-8.
        weight_decay: decoupled weight decay. None: 1e-2.
        max_grad_norm: clip the gradients as torch.nn.utils.clip_grad_norm_ does, in `step()`.
        params: parameter groups, or a function of the model that returns them; None: one group.
        optimizer: a torch.optim.AdamW or Adam to continue from, instead of lr to params. It is
            emptied; its scheduler keeps working. With resume=, only its groups are used.
        blocks: modules to use as blocks. None: blocks are found by the model's structure.
        weights: folder or file of safetensors, or GGUF file; frozen parameters are read in place.
        init: "model" (the model's own initialisation), or a function called with each module.
        method: "adamw", or "mezo" (zeroth-order, `model.zo_step(closure)`; docs/zeroth-order.md).
        states: the moments' format: "fp32", "bf16" or "8bit" (docs/low-precision-states.md).
        groups: process groups of modules that some processes lack (docs/several-processes.md).
        experts: "apart": each expert of a mixture is a block (docs/larger-than-memory.md).
        idle: "skip": with experts="apart", an expert without tokens is not updated.
        config: settings that do not change the numbers.
        **settings: fields of Config by name (host_bytes=, io=, commit_every=, ...).

    Returns:
        The same module, with `model.optimizer` (a torch optimizer) and `model.lohan` (the session).

    Raises:
        ModelError, UnsupportedError, BudgetError, StoreError: the message says what to change.
    """
    hyper = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    _arguments.check(model, hyper, store, resume, max_grad_norm, blocks, weights, init, config)
    of_method = _zo_setup.take(settings, max_grad_norm, optimizer)
    made = _settings.checked(_settings.make(config, settings, wrap), max_grad_norm, model)
    is_resumed, open_at = _arguments.resume_of(resume)
    _check_origin(optimizer, {**hyper, "params": params}, resume=is_resumed)
    with torch.inference_mode(False), joined(made.peer_timeout_s) as world:
        check_model(model, is_resumed or weights is not None or init is not None)
        zeroth = _zo_setup.make(method, model, {**hyper, **of_method}, made, store)
        apart, made = _settings.split(model, made, experts, idle, method, states, world, optimizer)
        with apart, _zo_setup.frozen(zeroth), _ties.kept_on_error(model):
            shared = _zo_world.Shared(world, zeroth, made, max_grad_norm, model, groups, states)
            store, open_at = shared.enter(store, is_resumed, open_at)
            opening = _lay_out(model, shared, zeroth, store, is_resumed, open_at, weights, blocks)
            opening.set_optimizer(apart.groups(params, model), hyper, optimizer, max_grad_norm)
            return apart.begin(opening.attach(store, is_resumed, weights, init))


def _check_origin(origin: Any, besides: dict[str, Any], *, resume: bool) -> None:
    if origin is not None:
        from lohan.session import _adopt

        _adopt.check(origin, besides, resume=resume)


def _lay_out(
    model: nn.Module,
    shared: _zo_world.Shared,
    zeroth: Zeroth | None,
    store: PathLike | Sequence[PathLike] | None,
    is_resumed: bool,
    open_at: int | None,
    weights: PathLike | None,
    blocks: Sequence[nn.Module] | None,
) -> _Opening:
    """Divide the model into blocks and units, and the budget among them."""
    found, rows = _find(zeroth, model, shared.config, store, is_resumed, weights, open_at)
    made, layout, budget = _division.divide(
        model, blocks, shared.config, found, rows, shared.ranks_of, shared.states
    )
    layout.groups = shared.described
    if shared.is_mate:
        from lohan.replicas import _join

        made = _join.config_of_mate(made)
        budget = _division.least(layout, made)
    if zeroth is None:
        made, budget = _division.commits_by_cost(layout, made, budget, shared.world)
    return _Opening(model, layout, made, budget, found, zeroth, open_at, shared)


@dataclasses.dataclass
class _Opening:
    """The parts of the session that wrap() is opening."""

    model: nn.Module
    layout: Layout
    config: Config
    budget: dict[str, int]
    found: Found | None  # what the files of weights= contain
    zeroth: Zeroth | None
    open_at: int | None  # the step to resume; None: the last
    shared: _zo_world.Shared
    optimizer: Any = None  # Optimizer, or ZerothOptimizer
    group_of: dict[int, int] = dataclasses.field(default_factory=dict)
    room: _core.Store | None = None  # SSD space for activations; later owned by the session
    was_in_memory: bool = False  # whether the model gets its values back if wrapping fails
    session: Session | None = None

    def set_optimizer(
        self,
        params: Iterable[dict[str, Any]] | None,
        hyper: dict[str, Any],
        origin: torch.optim.Optimizer | None,
        max_grad_norm: float | None,
    ) -> None:
        """Make the optimizer, and find the group of each parameter."""
        self.optimizer, self.group_of = _make_optimizer(
            self.layout, params, hyper, origin, self.zeroth, max_grad_norm
        )

    def agree(self, resume: bool, weights: Any, init: Any) -> None:
        """Check that all processes train the same model, from the same values."""
        given = (weights is not None, init is not None)
        self.shared.agree(self.layout, self.model, self.optimizer, resume, *given)

    def attach(
        self, where: PathLike | Sequence[PathLike] | None, resume: bool, weights: Any, init: Any
    ) -> nn.Module:
        """Open a session and attach it to the model; on an error or Ctrl-C, close the session."""
        self.agree(resume, weights, init)
        try:
            session = self.open(where, resume, weights, init)
            return _attach(self.model, session, self.optimizer, self)
        except BaseException:
            if self.session is not None:  # no other object could close it
                _exit.close_quietly(self.session)
            raise

    def open(
        self, where: PathLike | Sequence[PathLike] | None, resume: bool, weights: Any, init: Any
    ) -> Session:
        """Create or open the store and start a session on it; on an error, undo everything."""
        _activations.check_layers(self.config, self.layout)
        if resume and where is None:
            raise StoreError("resume=True needs store=: pass the directories of that store")
        directories = _directories.directories_of(where)
        _directories.refuse_windows_drives(directories)
        extents = _store.plan_extents(self.layout, self.config.commit_every == "never")
        try:
            if self.shared.is_mate:
                return self._follow(extents, directories, resume, weights, init)
            remove_remains([] if resume else directories)
            # Allocate this first: a full disk should be noticed before a store has been filled.
            store_bytes = 0 if resume else extents.nbytes
            self.room = _swap.make_room(self.config, directories, store_bytes)
            if resume:
                store = _store.open_existing(directories, self.config, open_at=self.open_at)
            else:
                self.layout.about = _names.about(self.model, self.layout)
                self.layout.about |= self.shared.about
                store = _store.create(self.layout, extents, directories, self.config, where is None)
            return self._begin(store, extents, directories, resume, weights, init, where is None)
        except BaseException:
            if self.room is not None:
                self.room.close()
            raise
        finally:
            if where is None:
                for directory in directories:
                    _temporary.remove_temporary(directory)

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
        """Fill a new store, or check that an existing one matches, and start the engine."""
        is_filled = resume
        self.was_in_memory = not any(p.tensor.is_meta for p in self.layout.params)
        session: Session | None = None
        tensors = [param.tensor for param in self.layout.params]
        try:
            self.layout.in_place.open(self.config)
            if resume:
                self._compare(extents, store)
                if self.zeroth is not None:
                    self.zeroth.resume(directories, store)
                self.shared.meet_at_store()
            else:
                if self.zeroth is not None:
                    self.zeroth.begin(directories, store)
                self._fill(extents, store, weights, init)
                is_from_memory = weights is None and init is None and self.was_in_memory
                self.shared.meet_at_store()
                if not is_from_memory:
                    self.shared.agree_on_filled(self.layout, extents, store, self.model)
                is_filled = True
                _weights.drop(self.layout)  # only now: before _fill(), memory had the only copy
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
        session.speaks = self.shared.world is None or self.shared.world.rank == 0
        if not temporary:
            session.keep_names()
        _opened.extend(session, self.shared.world)
        wear = None if self.zeroth is None else _zeroth_wear()
        full = functools.partial(_division.full_budget, self.layout, self.config)
        _opened.opened(session, wear, full, is_resumed=resume, is_temporary=temporary)
        if not temporary:
            _record(session, is_resumed=resume)
        self.optimizer.replaced = _replaced.Replaced(session, self.optimizer)
        _notes.say(session, self.optimizer.replaced.notes)
        _device.say_gpu(self.config)
        _buffers.say_rounded(self.model)
        return session

    def _follow(
        self,
        extents: _store.Extents,
        directories: list[str],
        resume: bool,
        weights: Any,
        init: Any,
    ) -> Session:
        """Start a session on the store of another process, which has filled or opened it."""
        self.was_in_memory = not any(p.tensor.is_meta for p in self.layout.params)
        is_from_memory = weights is None and init is None and self.was_in_memory
        tensors = [param.tensor for param in self.layout.params]
        if self.found is not None and not resume:
            _weights.prepare(self.model, self.layout, self.found.buffers, self.found.files)
        self.shared.meet_at_store()
        self.room = _swap.make_room(self.config, directories, 0)
        store = _store.open_existing(
            directories, self.config, read_only=True, is_held=True, open_at=self.open_at
        )
        try:
            self.layout.in_place.open(self.config)
            self._compare(extents, store)
            if not resume and not is_from_memory:
                self.shared.agree_on_filled(self.layout, extents, store, self.model)
            _weights.drop(self.layout)
            params = zip(tensors, self.layout.params, strict=True)
            self.optimizer.rebind({id(old): param.tensor for old, param in params})
            self.session = session = self._session(extents, store, directories)
        except BaseException:
            store.close()
            self.layout.in_place.close()
            raise
        session.adopt(self.optimizer)
        session.buffers = _store.buffers(self.model, self.layout, store)
        if resume:
            session.resumed_step = session.step
            session.restore_scalars()
        _opened.extend(session, self.shared.world)
        return session

    def _session(
        self, extents: _store.Extents, store: _core.Store, directories: list[str]
    ) -> Session:
        make: Any = Session
        device = _division.plan_device(self.layout, self.config)
        if self.zeroth is not None:
            from lohan.mezo._zo_session import ZerothSession

            make = functools.partial(ZerothSession, zeroth=self.zeroth)
        elif self.shared.world is not None:
            make = functools.partial(Session, peers=self.shared.peers(self.layout))
        elif _order.is_vertical(self.config, self.layout, self.budget, device):
            from lohan.session._vertical import Vertical

            make = functools.partial(Session, runs=Vertical(self.config.order))
        session: Session = make(
            self.layout,
            extents,
            store,
            self.config,
            self.budget,
            directories,
            self.group_of,
            len(self.optimizer.param_groups),
            norms=self.optimizer.max_grad_norm is not None
            or self.config.loss_scaling
            or self.config.on_nan == "skip",
            device=device,
            room=self.room,
        )
        return session

    def _compare(self, extents: _store.Extents, store: _core.Store) -> None:
        """Check that the store fits the model, and that files read in place are unchanged."""
        _store.check_same_model(store, self.layout)
        _store.check_slots(store, self.config)
        _store.check_table(store, extents)
        _checksums.read(self.layout, extents, store)
        if self.found is not None:
            from lohan.common import _meta
            from lohan.layout import _in_place_found

            # If another process has just filled the store, `then` is empty: only the store has it.
            then = self.found.then or _in_place_found.files_of(_meta.of(store))
            _checksums.check_content(self.layout, then)
        _weights.skip_fill(self.model, self.layout, self.found.files if self.found else ())

    def _fill(self, extents: _store.Extents, store: _core.Store, weights: Any, init: Any) -> None:
        adopted, origin = b"", self.optimizer.origin
        if origin is not None:
            from lohan.session import _adopt

            adopted = _adopt.write_state(origin, self.layout, extents, store)
        files = self.found.files if self.found is not None else ()
        if self.found is not None:
            _weights.prepare(self.model, self.layout, self.found.buffers, files)
        buffers = _store.buffers(self.model, self.layout, store)
        device = _division.plan_device(self.layout, self.config).torch_device
        own, count = None if self.zeroth else self.optimizer, len(self.layout.params)
        scalars = functools.partial(_scalars.at_start, own, adopted, count, buffers, device)
        given = (self.model, self.layout, extents, store, weights, init, scalars, files)
        _weights.fill(*given, reads_base=bool(self.shared.world or self.zeroth))


@torch.inference_mode(False)  # the values are for training
def unwrap(model: nn.Module) -> nn.Module:
    """Load a wrapped model's parameters back into memory and close its session.

    Args:
        model: a wrapped model whose parameters fit in memory. If its session is already closed,
            the parameters are those of the store's last commit.

    Returns:
        The same module on the CPU, which any optimizer can train again. The moments stay in the
        store; torch's optimizer that was passed to wrap(optimizer=) also gets their values back.

    Raises:
        ModelError: the model is not wrapped.
        StoreError: the session is closed and the store cannot be read.
    """
    session: Session | None = model.__dict__.get("lohan")
    guard: Guard | None = model.__dict__.get("_lohan_guard")
    if session is None or guard is None:
        raise ModelError("the model is not wrapped")
    origin: torch.optim.Optimizer | None = model.__dict__["optimizer"].origin
    layout, extents = session.layout, session.extents
    states: dict[int, Any] = {}
    if origin is not None:
        from lohan.session import _adopt
    if not session.closed:
        session.settle()
    is_late = session._peers.is_mate  # the store is another process's until that has closed it
    if origin is not None and _adopt.is_torchs(origin) and not is_late:
        with session.reading() as store:
            states = _adopt.read_state(layout, extents, store)
    values = session.values()
    if not session.closed:
        session.part()
    session.close()
    if origin is not None and _adopt.is_torchs(origin) and is_late:
        with session.reading() as store:
            states = _adopt.read_state(layout, extents, store)
    _exit.sessions.discard(session)
    session.unhook()
    guard.remove()
    if origin is not None:
        _adopt.release(origin, layout, states)
        _adopt.warn_of_lost_moments(origin)
    for param, value in zip(layout.params, values, strict=True):
        param.tensor.data = value
        if param.stream is not None:
            param.tensor.requires_grad_(True)
    session.apart.undo()
    session.device.give_buffers(model)
    _names.after_unwrap(model)
    _remove_attributes(model)
    return model


def _remove_attributes(model: nn.Module) -> None:
    for name in {"lohan", "optimizer", "no_sync", "zo_step", "_lohan_guard"} & {*model.__dict__}:
        object.__delattr__(model, name)


def _attach(model: nn.Module, session: Session, optimizer: Any, opening: _Opening) -> nn.Module:
    """Attach an open session to the model; on an error, close the session to unlock its store."""
    guard = Guard(model, session, _save_pretrained)
    try:
        _put_on(model, session, optimizer, guard)
        if opening.zeroth is not None:
            zeroth: Any = session
            object.__setattr__(model, "zo_step", zeroth.step_of(model))
    except BaseException:
        values: list[torch.Tensor] = []
        if opening.was_in_memory:
            with contextlib.suppress(Exception):
                values = session.values()
        _exit.close_quietly(session)
        _exit.sessions.discard(session)
        if guard.closer is not None:
            guard.closer.detach()
        if optimizer.origin is not None:
            from lohan.session import _adopt

            _adopt.release(optimizer.origin, session.layout, {})
        session.unhook()
        guard.remove()
        _remove_attributes(model)
        for param, value in zip(session.layout.params, values, strict=False):
            param.tensor.data = value
        raise
    return model


def _zeroth_wear() -> Any:
    from lohan.mezo._zo_wear import ZerothWear

    return ZerothWear


def _record(session: Session, *, is_resumed: bool) -> None:
    from lohan.session import _recorder

    _recorder.begin(session, is_resumed=is_resumed)


def _save_pretrained(*args: Any, **options: Any) -> None:
    from lohan.store import _export

    _export.save_pretrained(*args, **options)


def _put_on(model: nn.Module, session: Session, optimizer: Any, guard: Guard) -> None:
    if session.config.heap == "keep" and session.device.torch_device.type == "cpu":
        _core.heap_keep()
    session.hook(model, _activations.Activations(session), _activations.planner)
    session.device.take_buffers(model)
    guard.install()
    object.__setattr__(model, "lohan", session)
    object.__setattr__(model, "optimizer", optimizer)
    optimizer.outside = guard.outside
    object.__setattr__(model, "no_sync", session.no_sync)
    object.__setattr__(model, "_lohan_guard", guard)
    guard.closer = weakref.finalize(model, _exit.close_quietly, session)
    _exit.sessions.add(session)
    if optimizer.origin is not None:
        from lohan.session import _adopt

        _adopt.retire(optimizer.origin, session.layout)
    # Install these last: they affect the whole process and stay. A failed wrap() installs none.
    if _exit.set_handlers():
        _late.prepare()
        register_optimizer_step_pre_hook(_refuse_other_optimizer)


def _refuse_other_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, StoreOptimizer):
        return
    for session in _exit.sessions:
        names = {} if session.closed else session.param_names()
        for param in itertools.chain(*(group["params"] for group in optimizer.param_groups)):
            if id(param) in names:
                raise OffloadedGradientError(
                    f"{type(optimizer).__name__} cannot step parameter {names[id(param)]!r}, whose"
                    " values and gradient are managed by lohan: use model.optimizer"
                )


def _find(
    zeroth: Zeroth | None,
    model: nn.Module,
    config: Config,
    store: PathLike | Sequence[PathLike] | None,
    resume: bool,
    weights: PathLike | None,
    open_at: int | None,
) -> tuple[Found | None, list[Any]]:
    """Find the parameters that files provide: those of weights=, or those the store refers to.

    Returns:
        What the files provide (None: nothing), and the units of the store to resume (or []).
    """
    place = None if weights is None else Path(os.fspath(weights)).expanduser()
    if resume and store is not None:
        from lohan.layout import _in_place_found

        _directories.check(_directories.directories_of(store), config)
        meta = _store.read_meta(_directories.directories_of(store), config, open_at)
        _ties.separate_as_stored(model, meta)
        found = _in_place_found.of_store(meta, model, place)
        return _zo_setup.find(zeroth, found, meta), meta.get("units", [])
    if place is None:
        return _zo_setup.find(zeroth, None, None), []
    from lohan.layout import _in_place_found

    return _zo_setup.find(zeroth, _in_place_found.of_folder(place, model, config), None), []


def _make_optimizer(
    layout: Layout,
    params: Iterable[dict[str, Any]] | None,
    defaults: dict[str, Any],
    origin: torch.optim.Optimizer | None,
    zeroth: Zeroth | None,
    max_grad_norm: float | None,
) -> tuple[Any, dict[int, int]]:
    """Make the optimizer, and find the group of each parameter."""
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
                    " the model: to train several modules together, wrap them as one module"
                )
            if id(tensor) in seen:
                raise ModelError(
                    f"{name} has {layout.params[index[id(tensor)]].name!r} twice: list each"
                    " parameter once, in one group"
                )
            seen.add(id(tensor))
    given = {name: value for name, value in defaults.items() if value is not None}
    optimizer = Optimizer(groups or [{"params": []}], given)
    optimizer.max_grad_norm = max_grad_norm
    if origin is not None:
        from lohan.session import _adopt

        optimizer.origin = origin
        optimizer.begins_without_moments = not origin.state
        _adopt.share_hooks(optimizer, origin)
    group_of = {
        index[id(tensor)]: number
        for number, group in enumerate(optimizer.param_groups)
        for tensor in group["params"]
    }
    left = [p.name for p in trainable if p.index not in group_of]
    if left:
        raise ModelError(
            f"{name} omits {len(left)} parameters that require a gradient ({left[0]!r}, ...):"
            " add them to a group, or freeze them"
        )
    return optimizer, group_of
