"""From a request to a model with an open session, in one straight line (`wrapped()`).

What has to be undone if a later part fails is registered where it is done, in one ExitStack, which
is emptied at the end of a successful `wrap`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan.activations import _activations, _swap
from lohan.common import _durable, _log
from lohan.common._rules import RULES
from lohan.errors import StoreError, UnsupportedError
from lohan.layout import _experts, _names, _ties
from lohan.layout._block import BLOCK_ELEMENTS
from lohan.layout._experts import Apart
from lohan.opening import _attached, _combination, _groups, _request
from lohan.opening._model_checks import check_model
from lohan.opening._shared import Shared, joined
from lohan.session import _division, _notes, _opened, _outside
from lohan.session._training import Training
from lohan.store import _checksums, _directories, _scalars, _store, _weights
from lohan.torch_glue import _buffers, _device

if TYPE_CHECKING:
    from lohan import _core
    from lohan.config import Config
    from lohan.layout._block import Layout, Param
    from lohan.layout._in_place import Found
    from lohan.mezo._zo_setup import Zeroth
    from lohan.opening._combination import Facts
    from lohan.opening._request import Request
    from lohan.world._world import World

PathLike = str | os.PathLike[str]


def wrapped(request: Request) -> nn.Module:
    """Do what a call of `lohan.wrap` asks for; on an error or Ctrl-C, undo everything.

    Returns:
        The model of the request, with its optimizer and an open session.
    """
    model, config = request.model, request.config
    with (
        torch.inference_mode(False),
        joined(config.peer_timeout_s) as world,
        contextlib.ExitStack() as undo,
    ):
        check_model(model, request.is_filled)
        facts = _facts(request, world)
        _combination.check(facts)
        config = _request.waiting(config, request, facts.processes or 1)
        zeroth = _zeroth(request, undo)
        apart, config = _split(model, config, facts, undo)
        if zeroth is not None:
            zeroth.split(apart)
        if request.optimizer is not None:
            from lohan.session import _adopt

            undo.callback(_adopt.split(request.optimizer, apart))
        undo.callback(_ties.restorer(model))
        shared = Shared(world, zeroth, config, request)
        store, open_at = shared.enter(request.store, request.is_resumed, request.open_at)
        if zeroth is not None and open_at is not None and store is not None:
            places = _directories.directories_of(store)
            open_at = zeroth.go_back(places, shared.config, open_at)
        groups, matrices = apart.groups(request.params, model), None
        if RULES[request.rule].others:
            from lohan.opening import _matrices

            groups, matrices = _matrices.with_matrices(groups, model, request.hyper)
        opening = _lay_out(request, shared, zeroth, store, open_at, matrices)
        found = dataclasses.replace(request.config, sum_order=opening.config.sum_order)
        _combination.check(dataclasses.replace(facts, config=found))
        opening.set_optimizer(groups)
        session: Any = opening.open(undo)
        _attached.attach(model, session, opening.optimizer, opening.in_memory, undo)
        if zeroth is not None:
            object.__setattr__(model, "zo_step", session.method.step_of(model))
            object.__setattr__(model, "zo_together", session.method.together)
        apart.begin(model)
        undo.pop_all()
    return model


def _facts(request: Request, world: World | None) -> Facts:
    peers = [] if world is None else world.peers
    has_mates = len({peer.node for peer in peers}) < len(peers)
    return request.facts(processes=max(len(peers), 1), has_mates=has_mates)


def _zeroth(request: Request, undo: contextlib.ExitStack) -> Zeroth | None:
    """Prepare zeroth-order training, and freeze what it trains; None for AdamW."""
    if request.method != "mezo":
        return None
    from lohan.mezo import _zo_setup

    asked = {**request.hyper, **request.of_method}
    _zo_setup.check(asked)  # here, so that an error of one process reaches the others
    zeroth = _zo_setup.make(request.model, asked, request.config, request.store)
    undo.callback(zeroth.freeze())
    return zeroth


def _split(
    model: nn.Module, config: Config, facts: Facts, undo: contextlib.ExitStack
) -> tuple[Apart, Config]:
    """Make experts blocks of their own, if asked to, and choose a schedule that they support.

    Raises:
        ModelError: the model has no module of experts.
        UnsupportedError: the experts are trained, which another setting does not support.
    """
    is_exact = facts.idle == "exact"
    if facts.experts == "together":
        made = Apart()
    else:
        made = _experts.split(model, owes=is_exact)
    undo.callback(made.undo)
    made.adapt(model)
    if made.trained is None:
        return made, config
    _combination.check(dataclasses.replace(facts, trains_experts=True))
    if RULES[facts.rule].has_rows:
        _check_rows(made, facts)
    if is_exact and config.schedule == "auto":
        config = dataclasses.replace(config, schedule="optimized")
    return made, config


def _check_rows(apart: Apart, facts: Facts) -> None:
    """Reject experts whose parameter as a whole has one second moment.

    Raises:
        UnsupportedError: the message names the parameter.
    """
    for whole, parts in apart.wholes():
        is_row = parts[0].numel() >= BLOCK_ELEMENTS and whole.stride(0) == max(whole.stride())
        if whole.requires_grad and not is_row:
            raise UnsupportedError(
                "experts='apart', if they are trained, is not supported with"
                f" method={facts.method!r} for a parameter of shape {tuple(whole.shape)} and"
                f" strides {whole.stride()}, all experts of which share a second moment: each has"
                f" fewer than {BLOCK_ELEMENTS} elements, or they are not one after the other. Leave"
                " experts= out"
            )


def _with_sum_order(config: Config, meta: dict[str, Any] | None) -> Config:
    """Return the settings with the order of sums of the store, described by meta."""
    if config.sum_order is None and not (meta and "sum_order" in meta):
        return dataclasses.replace(config, sum_order="sequential")
    from lohan.opening import _sum_order

    return _sum_order.settled(config, meta)


def _lay_out(
    request: Request,
    shared: Shared,
    zeroth: Zeroth | None,
    store: PathLike | Sequence[PathLike] | None,
    open_at: int | None,
    matrices: dict[int, float] | None,
) -> Opening:
    """Divide the model into blocks and units, and the budget among them."""
    model = request.model
    found, meta = _find(request, zeroth, shared.config, store, open_at)
    if zeroth is None:
        shared.config = _with_sum_order(shared.config, meta)
    made, layout, budget = _division.divide(
        model,
        request.blocks,
        shared.config,
        found,
        [] if meta is None else meta.get("units", []),
        shared.ranks_of,
        shared.states,
        shared.rule,
        matrices,
    )
    layout.groups = shared.described
    if shared.is_mate:
        from lohan.replicas import _join

        made = _join.config_of_mate(made)
        layout.in_place.kept_bytes = 0  # its owner keeps what is packed
        layout.averages_idle = False  # and has the averages
        budget = _division.least(layout, made)
    if zeroth is None:
        made, budget = _division.commits_by_cost(layout, made, budget, shared.world)
    return Opening(request, layout, made, budget, found, zeroth, store, open_at, shared)


def _find(
    request: Request,
    zeroth: Zeroth | None,
    config: Config,
    store: PathLike | Sequence[PathLike] | None,
    open_at: int | None,
) -> tuple[Found | None, dict[str, Any] | None]:
    """Find the parameters that files provide: those of weights=, or those the store refers to.

    Returns:
        What the files provide (None: nothing), and the description of the store to resume (None:
        the store is new).
    """
    model, weights = request.model, request.weights
    place = None if weights is None else Path(os.fspath(weights)).expanduser()
    if place is None and not (request.is_resumed and store is not None):
        return _trained(zeroth, None, None), None
    from lohan.layout import _in_place_found

    if request.is_resumed and store is not None:
        _directories.check(_directories.directories_of(store), config)
        meta = _store.read_meta(_directories.directories_of(store), config, open_at)
        _ties.separate_as_stored(model, meta)
        found = _in_place_found.of_store(meta, model, place)
        return _trained(zeroth, found, meta), meta
    assert place is not None
    return _trained(zeroth, _in_place_found.of_folder(place, model, config), None), None


def _trained(
    zeroth: Zeroth | None, found: Found | None, then: dict[str, Any] | None
) -> Found | None:
    """Note which parameters zeroth-order training changes; see mezo/_zo_setup.py."""
    if zeroth is None:
        return found
    from lohan.mezo import _zo_setup

    return _zo_setup.find(zeroth, found, then)


def _remove_remains(directories: Sequence[str]) -> None:
    """Remove a store that never had its weights; leave everything else.

    This comes before anything is allocated beside the new store, which gets the space.
    """
    if not any(os.path.exists(os.path.join(directory, "lohan.data")) for directory in directories):
        return
    from lohan.store import _snapshot  # which few runs need

    if _snapshot.remove_unfinished(directories):
        _log.note(
            f"the store in {directories[0]} is made again: its creation was interrupted before all"
            " weights were in it"
        )


@dataclasses.dataclass
class Opening:
    """The parts of the session that wrap() is opening.

    Attributes:
        request: what wrap() was asked for.
        layout: the layout of the model's parameters.
        config: the settings of the session.
        budget: the division of host_bytes.
        found: what the files of weights= contain; None: nothing.
        zeroth: the zeroth-order run; None for AdamW.
        where: the store's directories, as they were named; None: a temporary store.
        open_at: the step to resume; None: the last one.
        shared: what several processes do together.
        optimizer: an Optimizer, or a ZerothOptimizer.
        group_of: the parameter group of each parameter, by its index.
        room: SSD space for activations; later owned by the session.
        apart: SSD space for gradients of steps that may be repeated; likewise.
        in_memory: the parameters that get their values back if wrapping fails.
        is_filled: whether the store has the model's values.
        directories: the directories of the store.
        extents: the places of tensors in the store.
    """

    request: Request
    layout: Layout
    config: Config
    budget: dict[str, int]
    found: Found | None
    zeroth: Zeroth | None
    where: PathLike | Sequence[PathLike] | None
    open_at: int | None
    shared: Shared
    optimizer: Any = None
    group_of: dict[int, int] = dataclasses.field(default_factory=dict)
    room: _core.Store | None = None
    apart: _core.Store | None = None
    in_memory: list[Param] = dataclasses.field(default_factory=list)
    is_filled: bool = False
    directories: list[str] = dataclasses.field(default_factory=list)
    extents: Any = None

    def set_optimizer(self, params: Any) -> None:
        """Make the optimizer, and find the group of each parameter."""
        asked = self.request
        self.optimizer, self.group_of = _groups.make_optimizer(
            self.layout,
            params,
            asked.hyper,
            asked.optimizer,
            self.zeroth,
            asked.max_grad_norm,
            RULES[asked.rule],
        )

    def open(self, undo: contextlib.ExitStack) -> Training:
        """Create, resume or follow a store, and start a session on it."""
        request = self.request
        given = (request.weights is not None, request.init is not None)
        self.shared.agree(self.layout, request.model, self.optimizer, request.is_resumed, *given)
        _activations.check_layers(self.config, self.layout)
        if request.is_resumed and self.where is None:
            raise StoreError("resume=True needs store=: pass the directories of that store")
        self.directories = _directories.directories_of(self.where)
        _directories.refuse_windows_drives(self.directories)
        self.extents = _store.plan_extents(self.layout, self.config.commit_every == "never")
        self.in_memory = [p for p in self.layout.params if not p.tensor.is_meta]
        self.is_filled = request.is_resumed or self.shared.is_mate
        before = [param.tensor for param in self.layout.params]
        undo.push(self._note)
        undo.callback(self._put_back, before)
        if self._is_read:
            undo.callback(self._keep, [param.tensor.data for param in self.in_memory])
        try:
            with contextlib.ExitStack() as parts:  # what the session does not own yet
                if self.shared.is_mate:
                    store = self._follow(parts)
                elif request.is_resumed:
                    store = self._resume(parts)
                else:
                    store = self._create(parts)
                params = zip(before, self.layout.params, strict=True)
                self.optimizer.rebind({id(old): param.tensor for old, param in params})
                session = self._session(self.extents, store, self.directories)
                parts.pop_all()
                undo.callback(_attached.give_up, session, self.in_memory)
            self._begin(session)
        finally:
            if self.where is None:
                for directory in self.directories:
                    _directories.remove_temporary(directory)
        return session

    def _note(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Add to an error that the store has the weights."""
        if error is not None and self.is_filled and not self._is_read and self.where is not None:
            error.add_note("the weights are in the store: wrap again with resume=True")

    def _keep(self, values: Sequence[torch.Tensor]) -> None:
        """Give the parameters the values that memory had, which a store that is read may lack."""
        for param, value in zip(self.in_memory, values, strict=True):
            param.tensor.data = value

    def _put_back(self, before: Sequence[torch.Tensor]) -> None:
        """Give the model its parameters without storage again, which another wrap() can fill."""
        pairs = zip(before, self.layout.params, strict=True)
        empty: Any = {id(p.tensor): old for old, p in pairs if old.is_meta}
        _weights.put(self.request.model, self.layout, empty)

    @property
    def _is_read(self) -> bool:
        """Whether another session, or another process, has made the store."""
        return self.request.is_resumed or self.shared.is_mate

    @property
    def _is_from_memory(self) -> bool:
        request = self.request
        return request.weights is None and request.init is None and not self._is_empty

    @property
    def _is_empty(self) -> bool:
        """Whether a parameter had no values in memory."""
        return len(self.in_memory) < len(self.layout.params)

    # --- The store ------------------------------------------------------------------------------

    def _create(self, parts: contextlib.ExitStack) -> _core.Store:
        """Create the store and fill it."""
        _remove_remains(self.directories)
        made = [path for name in self.directories for path in _durable.missing(Path(name))]
        parts.callback(self._remove_made, made)
        # Allocate this first: a full disk should be noticed before a store has been filled.
        self._make_room(parts, self.extents.nbytes)
        about = self.shared.about | (
            {"sum_order": "tree"} if self.config.sum_order == "tree" else {}
        )
        self.layout.about = _names.about(self.request.model, self.layout) | about
        is_temporary = self.where is None
        store = _store.create(
            self.layout, self.extents, self.directories, self.config, is_temporary
        )
        parts.callback(self._give_back, store)
        self.layout.in_place.open(self.config)
        if self.zeroth is not None:
            self.zeroth.begin(self.directories, store)
        self._fill(self.extents, store, self.request.weights, self.request.init)
        self.shared.meet_at_store()
        self._agree_on_filled(store)
        self.is_filled = True
        _weights.drop(self.layout)  # only now: before _fill(), memory had the only copy
        return store

    def _resume(self, parts: contextlib.ExitStack) -> _core.Store:
        """Open the store of an earlier session, and check that it matches."""
        self._make_room(parts, 0)
        store = _store.open_existing(self.directories, self.config, open_at=self.open_at)
        parts.callback(self._give_back, store)
        self.layout.in_place.open(self.config)
        self._compare(self.extents, store)
        if self.zeroth is not None:
            self.zeroth.resume(self.directories, store)
        self.shared.meet_at_store()
        return store

    def _follow(self, parts: contextlib.ExitStack) -> _core.Store:
        """Open the store of another process, which has filled or opened it."""
        request = self.request
        if self.found is not None and not request.is_resumed:
            _weights.prepare(request.model, self.layout, self.found.buffers, self.found.files)
        self.shared.meet_at_store()
        self._make_room(parts, 0)
        store = _store.open_existing(
            self.directories, self.config, read_only=True, is_held=True, open_at=self.open_at
        )
        parts.callback(self._give_back, store)
        self.layout.in_place.open(self.config)
        self._compare(self.extents, store)
        if not request.is_resumed:
            self._agree_on_filled(store)
        _weights.drop(self.layout)
        return store

    def _make_room(self, parts: contextlib.ExitStack, store_bytes: int) -> None:
        self.room = _swap.make_room(self.config, self.directories, store_bytes)
        if self.room is not None:
            parts.callback(self.room.close)
        nbytes = _division.apart_bytes(self.layout, self.config, self.budget)
        self.apart = _swap.make_apart(self.config, self.directories, nbytes)
        if self.apart is not None:
            parts.callback(self.apart.close)

    def _give_back(self, store: _core.Store) -> None:
        """Undo what was done with a store that no session owns; remove it if it has no values."""
        if self.is_filled and not self._is_read:
            _weights.recover(self.layout, self.extents, store, self.in_memory)
        store.close()
        self.layout.in_place.close()
        if self.zeroth is not None:
            self.zeroth.close(is_lost=not self.is_filled)
        if not self.is_filled and self.where is not None:
            _store.remove(self.directories)

    def _remove_made(self, made: list[Path]) -> None:
        """Remove the directories that were created for a store that has no values."""
        for path in [] if self.is_filled else sorted(made, reverse=True):
            with contextlib.suppress(OSError):  # another one of them is inside, or a file
                path.rmdir()

    def _agree_on_filled(self, store: _core.Store) -> None:
        if not self._is_from_memory:
            self.shared.agree_on_filled(self.layout, self.extents, store, self.request.model)

    def _compare(self, extents: _store.Extents, store: _core.Store) -> None:
        """Check that the store fits the model, and that files read in place are unchanged."""
        from lohan.store import _same

        _same.check_same_model(store, self.layout)
        _same.check_slots(store, self.config)
        _same.check_table(store, extents)
        if RULES[self.request.rule].others:
            from lohan.opening import _matrices

            _matrices.resume(self.layout, self.optimizer, self.group_of, store)
        _checksums.read(self.layout, extents, store)
        if self.found is not None:
            from lohan.common import _meta
            from lohan.layout import _in_place_found

            # If another process has just filled the store, `then` is empty: only the store has it.
            then = self.found.then or _in_place_found.files_of(_meta.of(store))
            _checksums.check_content(self.layout, then)
        _weights.skip_fill(self.request.model, self.layout, self.found.files if self.found else ())

    def _fill(self, extents: _store.Extents, store: _core.Store, weights: Any, init: Any) -> None:
        adopted, origin = b"", self.optimizer.origin
        if origin is not None:
            from lohan.session import _adopt

            adopted = _adopt.write_state(origin, self.layout, extents, store)
        files = self.found.files if self.found is not None else ()
        if self.found is not None:
            _weights.prepare(self.request.model, self.layout, self.found.buffers, files)
        buffers = _store.buffers(self.request.model, self.layout, store)
        device = _division.plan_device(self.layout, self.config).torch_device
        own, count = None if self.zeroth else self.optimizer, len(self.layout.params)
        scalars = functools.partial(_scalars.at_start, own, adopted, count, buffers, device)
        given = (self.request.model, self.layout, extents, store, weights, init, scalars, files)
        _weights.fill(*given, reads_base=bool(self.shared.world or self.zeroth))

    # --- The session ----------------------------------------------------------------------------

    def _session(
        self, extents: _store.Extents, store: _core.Store, directories: list[str]
    ) -> Training:
        make: Any = Training
        device = _division.plan_device(self.layout, self.config)
        if self.zeroth is not None:
            from lohan.mezo._zo_method import MeZO
            from lohan.mezo._zo_turns import Turns

            turns = Turns()
            make = functools.partial(Training, runs=turns, method=MeZO(self.zeroth, turns))
        else:
            if self.shared.world is not None:
                make = functools.partial(make, peers=self.shared.peers(self.layout))
            if self.config.order == "vertical" or self.config.sums_gradients:
                make = self._in_order(make, device)
        session: Training = make(
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
            apart=self.apart,
        )
        return session

    def _in_order(self, make: Any, device: _device.Device) -> Any:
        """Return what makes a session, which can use the vertical order if that was asked for."""
        from lohan.session import _order

        if not _order.is_vertical(self.config, self.layout, self.budget, device):
            return make
        from lohan.session._vertical import Vertical

        return functools.partial(make, runs=Vertical(self.config.order))

    def _begin(self, session: Training) -> None:
        """Give the session its optimizer, buffers and extensions, and print what was opened."""
        model, is_resumed = self.request.model, self.request.is_resumed
        is_temporary = self.where is None
        session.optimizer = self.optimizer
        self.optimizer.attach(session)
        session.buffers = _store.buffers(model, self.layout, session.store)
        if is_resumed:
            session.resumed_step = session.step
            session.restore_scalars()
        if self.shared.is_mate:
            _opened.extend(session, self.shared.world)
            return
        session.speaks = self.shared.world is None or self.shared.world.rank == 0
        if not is_temporary:
            session.commits.keep_names()
        _opened.extend(session, self.shared.world)
        wear: Any = None
        if self.zeroth is not None:
            from lohan.mezo._zo_wear import ZerothWear

            wear = ZerothWear
        full = functools.partial(_division.full_budget, self.layout, self.config)
        _opened.opened(session, wear, full, is_resumed=is_resumed, is_temporary=is_temporary)
        if not is_temporary:
            from lohan.session import _recorder

            _recorder.begin(session, is_resumed=is_resumed)
        self.optimizer.replaced = _outside.Replaced(session, self.optimizer)
        _notes.say(session, self.optimizer.replaced.notes)
        _device.say_gpu(self.config)
        _buffers.say_rounded(model)
