"""Averages of parameters in a session: when they begin, and `lohan.ema`, which computes with them.

[Note: Averages in place of parameters] To evaluate averages without a second copy in memory, the
store exchanges them with the parameters, piece by piece, and the model reads the store as usual.
The exchange is exact, and doing it twice restores every bit. It is never committed: closed steps
are committed before, all calls that commit are refused until the parameters are back, and after
that the store, whose contents are the same as before, is committed again. If commits are manual,
or several processes have to commit the same steps, neither of both commits is made. So a process
that ends in between leaves the last commit, with parameters and averages in their own places. If an
exchange fails half-way, the session ends there, for the same reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from lohan import _core
from lohan.common._inside import inside
from lohan.errors import ModelError, StepError, UnsupportedError
from lohan.session._extension import Extension, Place
from lohan.store import _scalars

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from lohan.session._training import Training


class Averages(Extension):
    """The averages of a session's parameters."""

    place = Place.AVERAGES

    def __init__(self, session: Training) -> None:
        self._session = session
        self._units = [i for i, u in enumerate(session.layout.units) if u.has_average]
        self._first = 0  # the step after which averages begin, as copies
        self._holder: object = None  # for whom averages and parameters have changed places

    @property
    def is_swapped(self) -> bool:
        """Whether averages and parameters have changed places in the store."""
        return self._holder is not None

    @property
    def rest(self) -> float:
        """What a step adds of the parameters: 1 - ema; 1 in the step that begins the averages."""
        decay = self._session.config.ema
        if decay is None or not self._units:
            return 0.0
        return 1.0 if self._session.step == self._first else 1 - decay

    @property
    def is_on(self) -> bool:
        """Whether there are averages."""
        return self._session.layout.has_averages

    def state(self, session: Training) -> Mapping[str, Any]:
        """Return what a commit stores: the decay, and the step after which averages began."""
        return {"ema": [session.config.ema, self._first]}

    def restore(self, said: dict[str, Any]) -> None:
        """Restore the entry of state() in the last commit.

        The entry is of the last step. If moments were made 0 since, no parameter counts a step.

        Args:
            said: the store's description.
        """
        found = _scalars.average_of(said)
        if not any(_scalars.steps(said["scalars"], len(self._session.layout.params))):
            self.begin_again()
        elif found is not None:
            self._first = int(found[1])

    def begin_again(self) -> None:
        """Let the next step begin the averages again, as copies of its parameters."""
        self._first = self._session.step

    def refuse_swapped(self, what: str) -> None:
        """Raise an error if the averages are in the parameters' places.

        Raises:
            StepError: they are; `what` names the call.
        """
        if self.is_swapped:
            raise StepError(
                f"{what} inside `with lohan.ema(model)`, where the model has the averages of its"
                " parameters: leave the block first. Inside it, the model can be evaluated, read"
                " and saved"
            )

    def swap(self, holder: object) -> None:
        """Exchange averages and parameters; see [Note: Averages in place of parameters].

        Args:
            holder: an object of the caller, for swap_back().

        Raises:
            UnsupportedError: the model was wrapped without ema=.
            StepError: they are exchanged already, or a step is open.
        """
        self._session.check_open()
        if self.is_on:  # of which this process may have no part
            self._session.peers.check_averages()
        if not self._units:
            what = "pass ema=DECAY, such as 0.999, to lohan.wrap()"
            if self._session.config.ema is not None:
                what = "none of its parameters is trained (requires_grad)"
            raise UnsupportedError(f"the model has no averages: {what}")
        self.refuse_swapped("lohan.ema(model)")
        self._session.edits.check()
        self._session.forwards.end_interrupted()
        self._exchange(holder)

    def swap_back(self, holder: object) -> None:
        """Exchange them back and commit, unless swap() failed, or the session has ended."""
        if self._holder is holder and not self._session.closed:
            self._exchange(None)

    def _exchange(self, holder: object) -> None:
        from lohan.store import _average

        session = self._session
        is_begun = False
        try:
            with session.exclusive(self._units, commits=session.peers.commits_alone) as store:
                is_begun = True
                self._holder = self._holder or holder
                for index in self._units:
                    unit, places = session.layout.units[index], session.extents.units[index]
                    _average.exchange(unit, places, store)
                if holder is None:
                    if session.peers.commits_alone and not session.commits.by_hand:
                        session.commits.write(store)
                    self._holder = None
        except BaseException as error:
            if is_begun:
                session.commits.drop()
                error.add_note(
                    "this interrupted the exchange of parameters and averages, so the session was"
                    " closed; the store is at its last commit: wrap again with resume=True"
                )
            raise


def ema(model: nn.Module, decay: float | None = None) -> AbstractContextManager[None]:
    """Return a context in which a model has the averages of its parameters instead of themselves.

    The model was wrapped with ema=. Inside the `with` block it can be evaluated, read and saved,
    like any other; backward, commits and changes of its parameters are errors. Averages and
    parameters change places in the store, exactly and without a second copy in memory, which reads
    and writes about as many bytes as two steps. If the process ends inside the block, the store is
    at its last commit, in which nothing is exchanged.

    Args:
        model: a wrapped model.
        decay: the decay of its averages, for a reader of the script; None: not stated.

    Raises:
        ModelError: the model is not wrapped, or its averages have another decay.
        UnsupportedError: it was wrapped without ema= (on entering the context).
        StepError: between backward and `step()`, or inside another such block.
    """
    session = inside(model)
    if session is None:
        raise ModelError(
            "lohan.ema(model) needs a model that was wrapped with ema=DECAY: call"
            " model = lohan.wrap(model, ema=0.999, ...) first"
        )
    now = session.config.ema
    if decay is not None and decay != now:
        raise ModelError(
            f"lohan.ema(model, {decay!r}): the model was wrapped with ema={now}: pass the decay"
            f" that lohan.wrap() was given, or none. ema={decay!r} in lohan.wrap() is used from"
            " then on, but a store that was created without ema= has no averages"
        )
    averages, holder = session.averages, object()
    return _core.Context(lambda: averages.swap(holder), lambda: averages.swap_back(holder))
