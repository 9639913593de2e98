"""The session of a wrapped model: the names that programs use ([Note: Sessions])."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

from lohan.common import _inside

if TYPE_CHECKING:
    import torch

    from lohan.activations._planner import Plan
    from lohan.common._stats import StepStats
    from lohan.layout._origins import Origin
    from lohan.session._choices import Loss
    from lohan.session._registered import After
    from lohan.session._training import Training
    from lohan.store._snapshot import PathLike, Snapshot


@final
class Session:
    """A wrapped model's connection to its store and its engine, available as `model.lohan`."""

    __slots__ = ("__weakref__", "_training")

    def __init__(self, training: Training) -> None:
        self._training = training
        _inside.connect(self, training)

    def __repr__(self) -> str:
        """Return a readable summary."""
        return repr(self._training)

    @property
    def step(self) -> int:
        """The number of closed steps, including those before a resume."""
        return self._training.step

    @property
    def order(self) -> str:
        """The order of micro-batches: "horizontal" or "vertical"; "auto" until it is chosen."""
        return self._training.order

    def accumulate(self, functions: Sequence[Loss]) -> list[torch.Tensor]:
        """Run the forwards and backwards of a step's micro-batches; then call optimizer.step().

        With lohan.wrap(order="vertical") each block runs all micro-batches before the next block
        does, so parameters are read once for all of them, and the functions take turns on threads.
        The losses and gradients have the same bits in both orders.

        Args:
            functions: one function for each micro-batch. It calls the model once, and returns the
                loss, a tensor of one element. For the mean of the micro-batches, it divides the
                loss by their number.

        Returns:
            The losses, without graphs.

        Raises:
            ModelError: there are too many functions for the step, or one does not return a loss.
            SecondBackwardError: the step has all of its gradients already.
        """
        return self._training.accumulate(functions)

    def commit(self) -> None:
        """Wait until all closed steps and all edits of parameters are written and committed."""
        self._training.commit()

    def register(self, name: str, registered: Any, *, after: After = ...) -> None:
        """Include an object's state in every commit, and restore it in a resumed session.

        The state, `registered.state_dict()`, is taken when `model.optimizer.step()` is called, and
        belongs to the commit of that step: it has what the script did before the call, such as the
        position of a sampler, and lacks what it does after it. In a resumed session, register()
        calls `registered.load_state_dict()` with the state of the resumed step.

        Args:
            name: a name that is the same in all sessions.
            registered: an object with state_dict() and load_state_dict(): a sampler, a data loader,
                a scheduler. Its state has numbers, text, tensors, lists and dicts only.
            after: a function that the loop calls after each `step()`, such as `scheduler.step`.
                register() calls it once after it has restored a state. Torch's schedulers need
                after=, which may be None; the groups' hyper-parameters, which their constructors
                change, are restored with them.

        Raises:
            ModelError: the object lacks a method, or a name or `after` is missing or wrong.
            StepError: the session has made a step.
            UnsupportedError: the states are larger than a commit has room for (36 KB), or not
                made of plain values; or another process commits for this one.
        """
        self._training.registered.add(name, registered, after)

    def flush(self) -> None:
        """Wait until all closed steps are written."""
        self._training.flush()

    def keep(
        self, folder: PathLike, *, last: int | None = None, name: str | None = None
    ) -> Snapshot:
        """Begin to copy the store to `folder`/step-N, and keep only the newest copies there.

        Training continues meanwhile, as with snapshot(). If a copy is still in progress, this
        waits for it first. `lohan.wrap(..., store="FOLDER/step-N", resume=True)` continues from a
        copy. Older copies are removed only when the new one is complete.

        Args:
            folder: the folder of all copies; created if it does not exist.
            last: how many copies named step-N to keep, with the new one. None: all.
            name: a name instead of step-N, such as "best"; only a copy of that name replaces it.

        Returns:
            The copy in progress.

        Raises:
            ModelError: last or name is invalid.
            StoreExistsError: what has this name is in use, or no copy of this run.
            StoreError, UnsupportedError: as for `lohan.snapshot`.
        """
        from lohan.store import _kept

        return _kept.keep(self._training, folder, last=last, name=name)

    def close(self) -> None:
        """Finish and commit the closed steps, stop the engine and release the store. Idempotent.

        A Ctrl-C before the commit leaves the session open: a further call commits, and so does the
        end of the process. With commit_every="manual", everything since the last commit is lost,
        as in a crash.

        Raises:
            NonFiniteError: the last updates had a gradient that is not finite. A session that has
                raised this error before ends without it, with the store at its last commit.
        """
        self._training.close()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backwards do not complete the step; gradients are summed.

        `wrap` also makes no_sync() a method of the model, as in DistributedDataParallel of torch.

        Raises:
            UnsupportedError: on entering the context, if lohan.wrap() was not given accumulate=.
        """
        return self._training.open_step.accumulation.no_sync()

    def note(self, *, loss: float | None = None, tokens: float | None = None) -> None:
        """Add the loss or the number of tokens to the record of a step, for `lohan watch`.

        After a forward, the note is for the step that is in progress; between `step()` and the next
        forward, for the step that was just closed. Of several losses in a step the mean is
        recorded, of several numbers of tokens the sum. Nothing else depends on notes, and if steps
        are not recorded (step_records=False, a temporary store, another rank than 0), they have no
        effect.

        Args:
            loss: the loss, a number. `float(loss)` of a tensor waits for the device.
            tokens: the number of tokens.

        Raises:
            ModelError: an argument is not a number.
            SessionError: the session is closed.
        """
        self._training.note(loss=loss, tokens=tokens)

    def stats(self) -> StepStats:
        """Return times and bytes of this session's last finished step; zeros before the first."""
        return self._training.stats()

    def plan(self) -> Plan | None:
        """Return the plan for activations of forwards that have the shape of the last one.

        Return None if `activations` is not a policy, or if there is no plan for this shape yet.
        """
        return self._training.plan()

    def status(self) -> dict[str, Any]:
        """Return the engine's status: open steps, pinned and held memory, backend, page type.

        Its "budget" has the bytes of each part of main memory.
        """
        return self._training.status()

    def origins(self) -> dict[str, Origin]:
        """Return where the value of each parameter and persistent buffer came from, by its name.

        That is where they were when the model was wrapped; training does not change it. Names of
        tied parameters are in it, too. `str()` of an origin is readable text.
        """
        return dict(self._training.layout.origins)

    def snapshot(self, out: PathLike | Sequence[PathLike]) -> Snapshot:
        """Begin to copy the store at the last step to other directories while training continues.

        Commits that are due in the meantime wait for the copy. See `lohan.snapshot`.

        Args:
            out: one or several directories; the copy is striped over them.

        Returns:
            The copy in progress: `wait()` waits for it, and so does close().
        """
        return self._training.copy_begin(out)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the last steps as Chrome trace events, for `lohan trace` and ui.perfetto.dev.

        Raises:
            SessionError: wrap() was not given trace_events=, or the session is closed.
        """
        from lohan.session import _trace

        self._training.flush()
        _trace.save(path, self._training)
