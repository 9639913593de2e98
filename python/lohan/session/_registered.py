"""States of objects of the training script that commits include: `model.lohan.register()`.

[Note: Registered states] They are taken when `step()` is called, and are in that step's commit.
What the script does after `step()` is therefore missing from them. A learning-rate scheduler is
such an object, so the caller passes the function that the loop calls then (`after=`), and a resumed
run calls it once, because the state that it has restored is from before that call.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from lohan.common import _log
from lohan.errors import ModelError, StepError, StoreMismatchError, UnsupportedError
from lohan.session._extension import Extension, Place

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import EllipsisType

    from lohan.common._rules import Hyper
    from lohan.session._training import Training

    After = Callable[[], Any] | EllipsisType | None  # ...: not given

# What states may take of a commit's room for data (store/_store.py), as text.
ROOM_BYTES = 48 << 10
# What torch says of a class that it does not load, without its advice to load it nevertheless.
_UNPICKLER = re.compile(r"(?<=WeightsUnpickler error: )[^.]*(\.\w[^.]*)*")


def _packed(name: str, registered: Any) -> str:
    """Return an object's state as text.

    Raises:
        UnsupportedError: it has values of classes that cannot be loaded without running code.
    """
    state, raw = registered.state_dict(), io.BytesIO()
    try:
        torch.save(state, raw)
        torch.load(io.BytesIO(raw.getvalue()), weights_only=True)
    except Exception as error:  # both let any exception of their pickles through
        said = _UNPICKLER.search(str(error)) or re.match(".*", str(error).strip())
        reason = (said.group().strip() if said else "") or type(error).__name__
        raise UnsupportedError(
            f"the state of {name!r} ({type(registered).__name__}) is not made of numbers, text,"
            f" tensors, lists and dicts alone ({reason}): register an object whose state_dict()"
            " returns only these, such as array.tolist() instead of an array of numpy"
        ) from error
    return base64.b64encode(raw.getvalue()).decode()


def _unpacked(name: str, text: str) -> Any:
    """Return a state from its text.

    Raises:
        StoreMismatchError: the text is not one of _packed().
    """
    try:
        return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    except Exception as error:  # torch.load() lets any exception of its readers through
        raise StoreMismatchError(
            f"the store's state of {name!r} cannot be read ({type(error).__name__}): it was changed"
            " by another program. Resume without registering that object, or from a copy"
        ) from error


class Registered(Extension):
    """The objects that a script has registered with a session."""

    place = Place.REGISTERED

    def __init__(self, session: Training) -> None:
        self._session = session
        self._objects: dict[str, Any] = {}
        self._taken: dict[str, str] = {}  # their states when step() was called
        self._found: dict[str, str] = {}  # states of the resumed commit that nobody has taken yet
        self._hypers: list[Hyper] = []  # the groups' hyper-parameters in it

    def add(self, name: str, registered: Any, after: After = ...) -> None:
        """Implement Commits.register()."""
        session = self._session
        session.check_open()
        self._check(name, registered, after)
        if self.place not in session.extensions:
            session.extensions.add(self)
        self._objects[name] = registered
        is_found = name in self._found
        try:
            self._states()
            if is_found:
                registered.load_state_dict(_unpacked(name, self._found[name]))
        except BaseException:  # these methods are the caller's
            del self._objects[name]
            raise
        if not is_found:
            if session.resumed_step:
                _log.note(
                    f"the store has no state of {name!r} at step {session.resumed_step}: it was"
                    " not registered then, and keeps the state that it has now"
                )
            return
        del self._found[name]
        if isinstance(registered, LRScheduler):
            self._restore_groups()  # which its constructor has changed
        if callable(after):
            # Torch's schedulers warn unless step() was called, which it was before the commit.
            session.optimizer.__dict__["_opt_called"] = True
            after()

    def _check(self, name: Any, registered: Any, after: Any) -> None:
        session = self._session
        if not isinstance(name, str) or not name:
            raise ModelError(f"register({name!r}, ...): the name must be a text that is not empty")
        if self._objects.get(name, registered) is not registered:
            raise ModelError(
                f"register({name!r}, ...): another object has this name: choose another one"
            )
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(registered, method, None)):
                raise ModelError(
                    f"register({name!r}, ...): class {type(registered).__name__} has no {method}()"
                )
        if registered is session.optimizer:
            raise ModelError("model.optimizer is part of every commit: do not register it")
        names = session.param_names()
        is_module = isinstance(registered, nn.Module)
        if is_module and any(id(each) in names for each in registered.parameters()):
            raise ModelError(
                f"register({name!r}, ...): the parameters of {type(registered).__name__} are part"
                " of every commit: do not register a module that has them"
            )
        if isinstance(registered, LRScheduler) and after is ...:
            raise ModelError(
                f"register({name!r}, ...): states are taken in step(), and a scheduler steps after"
                " that: pass after=scheduler.step if the loop calls it after each step(), or"
                " after=None if it does so more rarely (docs/checkpoints.md)"
            )
        if session.peers.is_mate or session.layout.method is not None:
            what = "method='mezo'" if session.layout.method is not None else "Parallel(share=True)"
            raise UnsupportedError(
                f"register() is not supported with {what}: save the state with your own files"
            )
        if session.step != (session.resumed_step or 0):
            raise StepError(
                f"register({name!r}, ...) after step {session.step}: register objects before the"
                " first step of the session, so that every commit has their states"
            )

    def _states(self) -> dict[str, str]:
        """Return all states as text.

        Raises:
            UnsupportedError: they do not fit into a commit, or cannot be loaded.
        """
        states = {name: _packed(name, each) for name, each in self._objects.items()}
        sizes = {name: len(text) for name, text in states.items()}
        if sum(sizes.values()) > ROOM_BYTES:
            largest = max(sizes, key=lambda name: sizes[name])
            raise UnsupportedError(
                f"the registered states take {sum(sizes.values()):,} bytes, and a commit has room"
                f" for {ROOM_BYTES:,}: the largest is that of {largest!r}, with"
                f" {sizes[largest]:,}. Register a smaller state, such as a position instead of a"
                " list"
            )
        return states

    def _restore_groups(self) -> None:
        optimizer = self._session.optimizer
        for group, hyper in zip(optimizer.param_groups, self._hypers, strict=False):
            optimizer.rule.put(group, hyper)

    def step_begins(self, session: Training) -> None:
        """Take the states for the commit of the step that is closed next.

        Raises:
            UnsupportedError: a state has become too large, or has values that cannot be loaded.
        """
        if session.peers.has_gradients():
            self._taken = self._states()

    def state(self, session: Training) -> Mapping[str, Any]:
        """Return what a commit stores."""
        if not self._objects:
            return {}
        if self._found:
            names = ", ".join(map(repr, sorted(self._found)))
            _log.note(
                f"the store had states of {names}, which this run did not register: from now on it"
                " does not have them"
            )
            self._found = {}
        return {"registered": self._taken}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Keep the states of the last commit for objects that will be registered.

        Raises:
            StoreMismatchError: they are invalid.
        """
        found = state.get("registered", {})
        if not isinstance(found, dict) or not all(isinstance(t, str) for t in found.values()):
            raise StoreMismatchError("the registered states of the last commit are invalid")
        self._found = dict(found)
        self._hypers = [
            (float(lr), float(beta1), float(beta2), float(eps), float(decay))
            for lr, beta1, beta2, eps, decay in state.get("groups", [])
        ]
