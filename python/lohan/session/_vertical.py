"""Accumulated steps that bring each block in once for all micro-batches.

[Note: Vertical order] One after the other, k micro-batches read every block k times in forward and
k times in backward. With order="vertical", block i runs its k micro-batches before block i + 1, and
backward visits the blocks in reverse, so a step moves the parameters of one micro-batch, whatever k
is (the order of GreedySnake, arXiv 2512.17570).

    horizontal   forward 1: 0 1 2   backward 1: 2 1 0   forward 2: 0 1 2   backward 2: 2 1 0
    vertical     forward:   0 0 1 1 2 2                 backward:   2 2 1 1 0 0

Forward: each micro-batch's function is a complete call of the model on a thread of its own, and the
threads take turns at the blocks (torch_glue/_lockstep.py). Backward: one call of autograd for all
losses. Autograd runs the node with the highest number first, and the threads carry one counter of
these numbers from turn to turn (csrc/py/sequence.c), so backward takes the visits in reverse.

The bits are those of the horizontal order. A gradient of a parameter must not be added to another
micro-batch's by autograd, which would add in the parameter's dtype. So each micro-batch has an
alias of each trained parameter, a leaf of its own over the same bytes, which is in the parameter's
place while the micro-batch visits the block. Gradients are summed in fp32 in the order of the
micro-batches. The last micro-batch visits each block first, so backward, in reverse, brings them in
that order, unless micro-batches leave out different blocks; then those that come too early wait for
the end of the backward. An expert that is a block of its own has no visits: between two visits the
runs read theirs one after the other, by lent(), so their gradients wait for at most those of the
layer. A policy for activations profiles the first steps, in which the micro-batches run one after
the other, and then plans for all of them at once. Random numbers are those of the horizontal order,
too: see torch_glue/_random_starts.py.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan import _core
from lohan.common import _log
from lohan.errors import UnsupportedError
from lohan.session import _order
from lohan.session._choices import Loss, Runs, checked_loss
from lohan.session._hooks import Planned
from lohan.torch_glue._device import random_states, set_random_states
from lohan.torch_glue._lockstep import FIRST, SECOND, Lockstep, ThreadState, Visit
from lohan.torch_glue._random_starts import RandomStarts
from lohan.torch_glue._tensor import hollow, version_of, without_classes

if TYPE_CHECKING:
    from lohan.layout._block import Param
    from lohan.session._training import Training

# After this many steps in a row whose random numbers could not be predicted, no step tries to.
_MISS_COUNT_MAX = 3
_LOOK_S = 1.0


class _Turns(Lockstep):
    """Forwards that take turns, with one counter of nodes and a random state for each.

    Attributes:
        states: the random states of each run: where it begins, or has stopped.
    """

    def __init__(
        self, changed: Callable[[int], None], device: torch.device, states: list[list[torch.Tensor]]
    ) -> None:
        super().__init__(changed, device)
        self.states = states
        self._of = device
        self._next_node = 0

    def stopped(self, who: int) -> None:
        """Record where a run stops."""
        self._next_node = max(self._next_node, _core.sequence_peek())
        self.states[who] = random_states(self._of)

    def resume(self, who: int) -> None:
        """Continue where a run has stopped."""
        _core.sequence_raise(self._next_node)
        set_random_states(self.states[who], self._of)

    def _pass(self, who: int) -> None:
        self.stopped(who)
        super()._pass(who)
        self.resume(who)

    def wrapped(self, who: int, function: Loss) -> Loss:
        """Return a function that runs `function` as a run of this group."""

        def run() -> torch.Tensor:
            self.resume(who)
            loss = function()
            self.stopped(who)
            return loss

        return run


class Vertical(Runs):
    """Runs with order="vertical", or with order="auto" if that may become vertical.

    Args:
        order: the order of micro-batches, as in the settings.
    """

    _nothing: _core.Scope

    def __init__(self, order: str) -> None:
        self.order = order
        self._turns: _Turns | None = None
        # The places of each trained parameter: modules and names.
        self._places: dict[int, list[tuple[weakref.ref[nn.Module], str]]] = {}
        self._aliases: list[dict[int, nn.Parameter]] = []  # of each run, by the parameter's index
        self._visited: list[list[list[int]]] = []  # the units of each run's visits, in order
        self._arrivals: _Arrivals | None = None  # of the backward that runs
        self._lent: list[Param] = []  # what a run reads outside of blocks
        # The runs that read a parameter outside of blocks, by its index.
        self._users: dict[int, set[int]] = {}
        self._root_units: list[int] = []
        # The units of the modules around blocks, each run's, that the run is inside of.
        self._inside: list[list[list[int]]] = []
        self._led: set[int] = set()  # the runs that take part in the first one's forward
        self._starts = RandomStarts()
        self._miss_count = 0  # in a row
        self._model: Callable[[], nn.Module | None] = lambda: None

    def join(self, session: Training) -> None:
        """Serve a session, which has its engine."""
        super().join(session)
        self._nothing = session.engine.scope([])

    def hook(self, model: nn.Module) -> None:
        """Find where the parameters of a model are, for their aliases."""
        layout = self.session.layout
        indices, units = self.session.param_index, layout.units
        self._root_units = [u for s in layout.scopes if s.module is model for u in s.units]
        self._model = weakref.ref(model)
        for module in model.modules():
            for name, param in module._parameters.items():
                index = indices.get(id(param))
                if index is not None and units[layout.params[index].unit].trainable:
                    self._places.setdefault(index, []).append((weakref.ref(module), name))

    # --- Aliases ------------------------------------------------------------------------------

    def _params_of(self, units: Collection[int]) -> list[Param]:
        made: list[Param] = []
        for unit in units:
            if self.session.layout.units[unit].trainable:
                made += self.session.layout.units[unit].params
        return made

    def _empty(self, param: Param) -> torch.Tensor:
        return hollow(self.session.arrays[param.tensor.dtype], param.index, param.tensor.shape)

    def _alias(self, who: int, param: Param) -> nn.Parameter:
        found = self._aliases[who].get(param.index)
        if found is None:
            found = self._aliases[who][param.index] = nn.Parameter(self._empty(param))
            # Neither recomputation nor the guard may take the alias for a parameter of the user's.
            self.session.param_index[id(found)] = param.index
            model = self._model()
            assert model is not None
            model.__dict__["_lohan_guard"].index[id(found)] = param.index
            hook = self._alias_hook(who, param.index)
            register = found.register_post_accumulate_grad_hook
            self.session.hooks.add(register(hook))  # type: ignore[no-untyped-call]
        return found

    def _alias_hook(self, who: int, index: int) -> Callable[[torch.Tensor], None]:
        take = self.session.peers.gradient_hook(index)
        reference = weakref.ref(self)  # the garbage collector does not see what a hook refers to

        def hook(alias: torch.Tensor) -> None:
            runs = reference()
            if runs is not None and runs._arrivals is not None:
                runs._arrivals.came(index, who, alias, take)

        return hook

    def lent(self, tensors: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return a run's aliases of parameters that it reads outside of blocks.

        They are in memory, and in the places of the parameters, until the run reads such parameters
        of other units, or enters or leaves a block.
        """
        if self._turns is None:
            return list(tensors)
        layout, indices = self.session.layout, self.session.param_index
        params = [layout.params[indices[id(tensor)]] for tensor in tensors]
        units = {param.unit for param in params}
        if not any(layout.units[unit].trainable for unit in units):
            return list(tensors)
        if not {param.unit for param in self._lent} <= units:
            self._give_back()
        self.session.forwards.make_resident(tensors)
        who = self._turns.turn
        self._put(units, who)
        self._lent += self._params_of(units)
        for param in params:
            self._users.setdefault(param.index, set()).add(who)
        return [self._aliases[who].get(param.index, param.tensor) for param in params]

    def _give_back(self) -> None:
        """Make the aliases of lent() hollow."""
        with without_classes():
            for param in self._lent:
                self._fill_places(param, param.tensor)
                for aliases in self._aliases:
                    if param.index in aliases:
                        aliases[param.index].data = self._empty(param)
        self._lent.clear()

    def backward_begins(self) -> None:
        """Reject a backward of a function that takes turns."""
        if self._turns is not None:
            raise _no_turns(
                "a function of accumulate() ran a backward: each must return its loss instead, and"
                " accumulate() runs one backward for all; or"
            )

    def backward_ends(self) -> None:
        """Pass on the gradients that wait for those of other micro-batches."""
        if self._arrivals is not None:
            self._arrivals.end()

    def _put(self, units: Collection[int], who: int) -> None:
        """Put a run's aliases in the places of the units' parameters, which are in memory."""
        with without_classes():
            for param in self._params_of(units):
                alias = self._alias(who, param)
                alias.data = param.tensor.data
                self._fill_places(param, alias)

    def _remove(self, units: Sequence[int], who: int) -> None:
        """Put the parameters back in their places."""
        with without_classes():
            for param in self._params_of(units):
                self._fill_places(param, param.tensor)
                self._alias(who, param).data = self._empty(param)

    def _fill_places(self, param: Param, tensor: torch.Tensor) -> None:
        for reference, name in self._places.get(param.index, ()):
            module = reference()
            if module is not None:
                places: dict[str, Any] = module._parameters
                dict.__setitem__(places, name, tensor)

    def gradient_hook(
        self, index: int, take: Callable[[torch.Tensor], None]
    ) -> Callable[[torch.Tensor], None]:
        """Return the hook of a parameter, which has no gradients where its aliases have them."""
        reference = weakref.ref(self)

        def hook(tensor: torch.Tensor) -> None:
            runs = reference()
            if runs is not None and runs._arrivals is not None:
                tensor.grad = None
                name = runs.session.layout.params[index].name
                raise _no_turns(
                    f"parameter {name!r} was used outside the forward of its own"
                    " module, or in a reentrant checkpoint, where its gradients of several"
                    " micro-batches cannot be told apart: pass use_reentrant=False to the"
                    " checkpoint, or"
                )
            take(tensor)

        return hook

    # --- Turns --------------------------------------------------------------------------------

    def visits(self, units: list[int], scope: _core.Scope) -> Any:
        """Return the hooks around each forward of a scope's module, at which turns change."""
        if any(self.session.layout.units[unit].always for unit in units):
            # Turns are taken at the blocks inside it.
            return Visit(self, units, scope, Vertical.inside_begin, Vertical.inside_end)
        return Visit(self, units, scope, Vertical.visit_begin, Vertical.visit_end)

    def joins(self) -> bool:
        """Begin a forward as a part of the first run's; return whether it is one."""
        if self._turns is None or not self._turns.is_led():
            return False
        self._lead(self._turns.turn)
        return True

    def entered(self) -> None:
        """Put the aliases of a run in the places of the parameters that no block has."""
        if self._turns is not None:
            self._put(self._root_units, self._turns.turn)

    def leaves(self) -> None:
        """Wait until the other runs end their parts of the first one's forward, which ends."""
        if self._turns is not None and self._turns.turn == FIRST:
            self._turns.await_others(lambda: bool(self._led))

    def block_joins(self, begins: bool) -> bool | None:
        """Let a run call a block outside the model's own forward while the first run is in its."""
        turns = self._turns
        if turns is not None and turns.is_led() and begins:
            is_new = turns.turn not in self._led
            if is_new:
                self._lead(turns.turn)
            return is_new
        return False if not begins and self.parts() else None

    def _lead(self, who: int) -> None:
        self.session.forwards.around.enter()  # hooks for saved tensors belong to a thread
        self._led.add(who)

    def parts(self) -> bool:
        """End the part of a run in the first one's forward; return whether it took part in it."""
        if self._turns is None or self._turns.turn not in self._led:
            return False
        self._led.remove(self._turns.turn)
        self.session.forwards.around.leave()
        return True

    @property
    def takes_turns(self) -> bool:
        """Whether the forwards of several runs are under way."""
        return self._turns is not None

    def is_other(self) -> bool:
        """Return whether this is the thread of a run other than the first one's."""
        return self._turns is not None and self._turns.is_other()

    def _turn_changed(self, who: int) -> None:
        """Prepare for a run whose turn it is."""
        self._give_back()
        self._nothing.enter()  # release what the previous run bound between blocks
        if self.session.forwards.depth > 0:
            for units in (self._root_units, *self._inside[who]):
                self._put(units, who)

    def inside_begin(self, units: list[int], enter: Callable[[], None]) -> None:
        """Enter the scope of a module that contains blocks."""
        enter()
        if self._turns is not None:
            self._inside[self._turns.turn].append(units)
            self._put(units, self._turns.turn)

    def inside_end(self, units: list[int], leave: Callable[[], None]) -> None:
        """Leave the scope of a module that contains blocks, in the first run as the last one."""
        turns = self._turns
        if turns is None or units not in self._inside[turns.turn]:
            leave()
            return
        others = self._inside[SECOND:]
        try:
            if turns.turn == FIRST:
                turns.await_others(lambda: any(units in each for each in others))
        finally:
            self._inside[turns.turn].remove(units)
            self._remove(units, turns.turn)
            leave()

    def visit_begin(self, units: list[int], enter: Callable[[], None]) -> None:
        """Enter a block's scope when it is this run's turn."""
        turns = self._turns
        if turns is None:
            enter()
            return
        self._give_back()
        turns.visit_begin()
        self._visited[turns.turn].append(units)
        enter()
        self._put(units, turns.turn)

    def visit_end(self, units: list[int], leave: Callable[[], None]) -> None:
        """Leave a block's scope, but keep the block in memory until all runs have visited it.

        Processes that share parameters keep none: where their micro-batches visit different
        experts, each would hold a block and wait for room for its next one.
        """
        turns = self._turns
        if turns is None:
            leave()
            return
        self._give_back()
        self._remove(units, turns.turn)
        if turns.turn != FIRST or self.session.peers.has_mates:
            leave()
            turns.visit_end()
            return
        held: list[int] = []
        try:
            for unit in units:
                self.session.engine.acquire(unit)
                held.append(unit)
            leave()
            turns.visit_end()
        finally:
            for unit in held:
                self.session.engine.release(unit)

    # --- A step -------------------------------------------------------------------------------

    def run(self, functions: Sequence[Loss]) -> list[torch.Tensor]:
        """See Session.accumulate."""
        self.check(functions)
        session, peers = self.session, self.session.peers
        planned, count = session.extensions.get(Planned), len(functions)
        is_short = count == 1 or self._miss_count >= _MISS_COUNT_MAX
        is_short |= planned is not None and not planned.planner.plans_for(count)
        if self.order == "horizontal" or is_short or self._has_user_hooks():
            peers.turns_begin(count, at_once=False)
            return super().run(functions)
        if self.order == "auto":
            return self._choose(functions)
        device, layout = session.device.torch_device, session.layout
        begin = random_states(device)
        starts = self._starts.predict(begin, len(functions))
        losses, ends = self._forward(functions, starts)
        can = _are_same(ends[:-1], starts[1:])
        losses = [checked_loss(loss) for loss in losses]
        if not (peers.turns_begin(count, at_once=can) and can):
            del losses
            return self._learn(functions, begin)
        self._miss_count = 0
        set_random_states(ends[-1], device)
        is_even = all(each == self._visited[FIRST] for each in self._visited)
        around = {p.index for p in layout.params if layout.units[p.unit].always}
        turn = session.open_step.turn
        self._arrivals = _Arrivals(len(functions), is_even, around, self._users, turn)
        try:
            torch.autograd.backward(losses)
        finally:
            self._arrivals = None
        for _ in losses[1:]:
            session.open_step.accumulation.backward_end()
        return [loss.detach() for loss in losses]

    def _choose(self, functions: Sequence[Loss]) -> list[torch.Tensor]:
        """Run the functions one after the other, and choose the order of the next steps."""
        counter = self.session.saving.counter
        assert counter is not None
        before = _buffer_versions(self._model())

        def counted(function: Loss) -> Loss:
            def run() -> torch.Tensor:
                counter.begin()
                try:
                    return function()
                finally:
                    counter.is_on = False

            return run

        counter.nbytes = 0
        begin = random_states(self.session.device.torch_device)
        losses = self._learn([counted(function) for function in functions], begin)
        self._miss_count = 0 if self._miss_count < _MISS_COUNT_MAX else _MISS_COUNT_MAX
        can = _buffer_versions(self._model()) == before
        fits = can and _order.fits(self.session, counter.nbytes)
        self.order = "vertical" if fits else "horizontal"
        return losses

    def _has_user_hooks(self) -> bool:
        """Return whether a parameter has hooks of register_hook(), which its aliases lack."""
        with without_classes():
            return any(param.tensor._backward_hooks for param in self.session.layout.params)

    def _forward(
        self, functions: Sequence[Loss], starts: list[list[torch.Tensor]]
    ) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        """Run the functions in turns; return their results and the random states at their ends."""
        while len(self._aliases) < len(functions):
            self._aliases.append({})
        device = self.session.device.torch_device
        turns = _Turns(self._turn_changed, device, starts[::-1])
        state = ThreadState(device)
        # In reverse: the first micro-batch's gradients are to come first, see the note.
        runs = [turns.wrapped(who, each) for who, each in enumerate(reversed(functions))]
        results: list[torch.Tensor] = []
        errors: list[BaseException] = []

        def lead() -> None:
            try:
                with state.applied():
                    results.extend(turns.run(runs))
            except BaseException as error:
                errors.append(error)

        self._visited = [[] for _ in functions]
        self._inside = [[] for _ in functions]
        self._led = set()
        self._users = {}
        before = _buffer_versions(self._model())
        self._turns = turns
        # All runs have new threads, whose counters of nodes begin at 0 and stay near one another.
        try:
            _run_on_thread(lead, turns)
        finally:
            self._give_back()
            for who, inside in enumerate(self._inside):
                for units in (self._root_units, *inside):
                    self._remove(units, who)
            if any(self._inside):  # an error elsewhere has ended runs in modules that have blocks
                self.session.engine.scopes_drop()
            self._turns = None
        if errors:
            if isinstance(errors[0], MemoryError | torch.OutOfMemoryError):
                errors[0].add_note(
                    f'order="vertical" keeps the activations of {len(functions)} micro-batches at'
                    " once: offload or recompute them (activation_offload_bytes=, activations="
                    '"recompute"), or pass order="auto" or "horizontal"'
                )
            raise errors[0]
        if _buffer_versions(self._model()) != before:
            raise _no_turns(
                "the model's forward changes its buffers (statistics of a batch norm?), which"
                " would depend on the order of the micro-batches:"
            )
        return results[::-1], turns.states[::-1]

    def _learn(self, functions: Sequence[Loss], begin: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the functions one after the other, and learn how many random numbers each draws."""
        device = self.session.device.torch_device
        set_random_states(begin, device)
        states: list[list[torch.Tensor]] = []

        def noted(function: Loss) -> Loss:
            def run() -> torch.Tensor:
                states.append(random_states(device))
                return function()

            return run

        losses = super().run([noted(function) for function in functions])
        is_known = self._starts.learn(states)
        self._miss_count = self._miss_count + 1 if is_known else _MISS_COUNT_MAX
        if self._miss_count >= _MISS_COUNT_MAX:
            _log.note(
                "it cannot be predicted how many random numbers (dropout) each micro-batch"
                " draws. From now on the micro-batches run one after the other"
            )
        return losses


class _Arrivals:
    """Hands the gradients of one backward to the engine in the order of the micro-batches.

    Args:
        count: the number of micro-batches; run 0 has the last of them.
        is_even: whether all of them visited the same blocks, so that gradients come in order.
        around: the parameters of modules around blocks. Between two visits the first run computes
            last, so that its gradients of these come first.
        users: the runs that have used a parameter outside of blocks, which is like one of `around`.
        turn: called with the micro-batch of each gradient before that is handed over.
    """

    def __init__(
        self,
        count: int,
        is_even: bool,
        around: Container[int],
        users: Mapping[int, Container[int]],
        turn: Callable[[int], None],
    ) -> None:
        self._last = count - 1
        self._turn = turn
        self._is_even, self._around, self._users = is_even, around, users
        self._next: dict[int, int] = {}  # the first micro-batch whose gradient is not added yet
        self._early: dict[int, dict[int, Callable[[], None]]] = {}

    def came(
        self, index: int, who: int, alias: torch.Tensor, take: Callable[[torch.Tensor], None]
    ) -> None:
        """Take a gradient, or let it wait.

        Args:
            index: the parameter's index.
            who: the run.
            alias: the run's alias of the parameter, which has the gradient.
            take: hands the gradient of a tensor to the engine.
        """
        micro_batch = self._last - who
        users = self._users.get(index)
        if users is not None:  # count those alone that have a gradient
            micro_batch = sum(self._last - each in users for each in range(micro_batch))
        least = self._next.get(index, 0)
        if micro_batch < least:
            raise _no_turns(
                f"gradients of parameter {index} came from micro-batch {micro_batch} after those of"
                f" micro-batch {least - 1}:"
            )
        is_in_order = self._is_even and users is None and index not in self._around
        if micro_batch == least or is_in_order:
            self._turn(self._last - who)
            take(alias)
            self._next[index] = micro_batch + 1
            self._take_early(index)
            return
        gradient, alias.grad = alias.grad, None

        def later() -> None:
            alias.grad = gradient
            self._turn(self._last - who)
            take(alias)

        self._early.setdefault(index, {})[micro_batch] = later

    def _take_early(self, index: int) -> None:
        """Take the gradients whose turn has come."""
        waiting = self._early.get(index, {})
        while self._next[index] in waiting:
            waiting.pop(self._next[index])()
            self._next[index] += 1

    def end(self) -> None:
        """Take the gradients that waited for those of micro-batches that have none."""
        for waiting in self._early.values():
            for micro_batch in sorted(waiting):
                waiting[micro_batch]()
        self._early.clear()


def _run_on_thread(function: Callable[[], None], turns: _Turns) -> None:
    """Run a function on a thread of its own; an error here (Ctrl-C) ends its runs.

    Thread.join() is no way to wait: after an interrupt it takes a thread that runs for ended
    (Python 3.11).
    """
    is_over: list[bool] = []
    over = threading.Lock()
    over.acquire()

    def run() -> None:
        try:
            function()
        finally:
            is_over.append(True)
            over.release()

    error: BaseException | None = None
    threading.Thread(target=run, name="lohan-turn-0").start()
    while not is_over:
        try:
            over.acquire(timeout=_LOOK_S)  # an interrupt may come after the lock was acquired
        except BaseException as raised:
            error = error or raised
            turns.cancel(error)
    if error is not None:
        raise error


def _no_turns(why: str) -> UnsupportedError:
    """Return the error for what micro-batches that take turns cannot do."""
    return UnsupportedError(f'{why} wrap with order="horizontal"')


def _buffer_versions(model: nn.Module | None) -> list[tuple[int, int]]:
    assert model is not None
    return [(id(buffer), version_of(buffer)) for buffer in model.buffers()]


def _are_same(these: list[list[torch.Tensor]], those: list[list[torch.Tensor]]) -> bool:
    return all(
        torch.equal(a, b)
        for one, other in zip(these, those, strict=True)
        for a, b in zip(one, other, strict=True)
    )
