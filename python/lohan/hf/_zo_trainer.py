"""Zeroth-order training with a Trainer: `lohan.TrainerCallback(store=..., method="mezo")`.

[Note: Where a Trainer's step is] A Trainer's loop prepares a batch, computes its loss, runs
backward, and later calls step(). Zeroth-order training does all of that at once, with two losses of
the same batch. The loop and the Trainer's training_step still run unchanged, except for three
things: compute_loss, when training_step calls it, runs zo_step, which calls the Trainer's own
compute_loss for each of the two losses; backward does nothing; and optimizer.step() does nothing,
because the step has already been made. When batches are accumulated, all but the last are only
collected. The last batch makes the step, whose loss is the sum of the losses that the Trainer would
have passed to backward.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lohan.common import _log, _meta
from lohan.common._keywords import SGD, Adagrad, MeZO, RMSprop
from lohan.errors import ModelError, StepError, UnsupportedError
from lohan.journal import _journal
from lohan.journal._zo_run import uuid_of
from lohan.opening._combination import METHODS, OF_METHOD
from lohan.store import _store

if TYPE_CHECKING:
    from lohan import _core
    from lohan.config import Config

# Keywords of lohan.wrap() that only method="mezo" accepts, or that have another meaning with it.
KEYWORDS = ("method", "eps", *OF_METHOD)

# TrainingArguments that have no effect on a zeroth-order step, each with the reason.
_UNUSED = {
    "max_grad_norm": "there are no gradients to clip",
    "adam_beta1": "there are no moments",
    "adam_beta2": "there are no moments",
    "adam_epsilon": "eps= of lohan.TrainerCallback sets how far parameters are moved",
    "neftune_noise_alpha": "a step runs the model in evaluation mode, without noise",
}


def is_asked(settings: Mapping[str, Any]) -> bool:
    """Return whether the callback's arguments request zeroth-order training.

    Raises:
        ModelError: the method is unknown, or an argument is only valid with another method.
    """
    method = settings.get("method", METHODS[0])
    if isinstance(method, MeZO):
        return True
    is_group = isinstance(method, SGD | Adagrad | RMSprop)
    if is_group or (method in METHODS and method not in ("adamw", "mezo")):
        raise UnsupportedError(
            f"method={method!r} is not supported by the Trainer's callback: call lohan.wrap() in a"
            " training loop of your own, or leave method= out"
        )
    if method not in METHODS:
        raise ModelError(f"method {method!r} must be one of {', '.join(METHODS)}")
    for name in OF_METHOD:
        if name in settings and method != "mezo":
            raise ModelError(f'{name}= is only valid with method="mezo"')
    return bool(method == "mezo")


def asked(args: Any, made: torch.optim.Optimizer, *, resumes: bool) -> dict[str, Any]:
    """Translate the Trainer's arguments and its optimizer into arguments of lohan.wrap().

    A run that is resumed keeps its rule and hyper-parameters, so only the groups are passed.
    """
    groups = [
        {"params": group["params"], "weight_decay": group.get("weight_decay", 0.0)}
        for group in made.param_groups
    ]
    if resumes:
        return {"params": groups}
    for group, its in zip(groups, made.param_groups, strict=True):
        group["lr"] = its["lr"]
    return {
        "params": groups,
        "lr": args.learning_rate,
        "weight_decay": args.weight_decay,
        "seed": args.seed,
    }


def step_of(store: _core.Store) -> int:
    """Return the last step of a store: the journal's if there is a journal, else the commit's."""
    said = store.describe()
    if _meta.of(store).get("method") is None:
        return int(said["step"])
    directories = [os.path.dirname(path) for path, _, _ in said["files"]]
    return len(_journal.read(directories, uuid_of(store))[1])


def base_of(directories: Sequence[str], config: Config) -> int:
    """Return the step of a store's last commit, from which its journal is replayed."""
    store = _store.open_existing(directories, config, read_only=True)
    try:
        return int(store.describe()["step"])
    finally:
        store.close()


def take_back(directories: Sequence[str], config: Config, folder: Path, step: int) -> None:
    """Roll a store back to a checkpoint, from which the run then makes the later steps again.

    Args:
        directories: the store's directories.
        config: the settings of the session that will resume.
        folder: the checkpoint's folder, for the message.
        step: the checkpoint's step; not before the store's last commit.
    """
    # Opened for writing, so that no other process can train it meanwhile.
    store = _store.open_existing(directories, config)
    try:
        end, kept = _journal.cut(directories, uuid_of(store), step)
    finally:
        store.close()
    _log.note(
        f"the store is at step {end}, but {folder} is at step {step}: rolling the store back"
        f" to step {step}; the later steps will be made again (the previous journal is kept as"
        f" {kept})"
    )


def way_out(place: str, step: int) -> str:
    """Return the end of the error message if no checkpoint in the folder matches the store."""
    return (
        ": parameters of a later step were written since (MeZO(write_every=)), and these cannot"
        " be rolled"
        f" back. lohan.export({place!r}, OUT, dtype='float32') exports the parameters of step"
        f" {step}, for a Trainer with a new store; lohan.wrap(model, store={place!r},"
        ' method="mezo", resume=True) resumes from that step in your own training loop'
    )


class Steps:
    """The replacements for a Trainer's methods when its model is trained without backward.

    See [Note: Where a Trainer's step is].
    """

    def __init__(self, trainer: Any, model: Any) -> None:
        """Replace the methods of one Trainer, whose model is wrapped."""
        self._trainer = trainer
        self._model = model
        self._kept: list[Callable[[], float]] = []
        self._calls = 0  # the calls of compute_loss by one training_step
        self._is_asked = False  # inside a training_step, but not inside its zo_step
        self._loss: torch.Tensor | None = None
        self._is_made = False  # a step was made whose optimizer.step() has not been called yet
        trainer.training_step = functools.partial(self._training_step, trainer.training_step)
        trainer.compute_loss = functools.partial(self._compute_loss, trainer.compute_loss)
        # Without gradients there is no norm to clip by or to log.
        trainer._clip_grad_norm = lambda model: None
        trainer._get_grad_norm = lambda model, grad_norm=None: None
        model.optimizer.step = functools.partial(self._close, model.optimizer.step)
        _say_unused(trainer.args)

    def begin(self) -> None:
        """Prepare for a call of train(): discard a step that the previous call left unfinished."""
        self._kept.clear()
        self._is_made = False
        # With fp16, a scaler keeps gradients from vanishing; zeroth-order steps have no gradients.
        if hasattr(self._trainer.optimizer, "scaler"):
            self._trainer.optimizer.scaler = None

    def _training_step(
        self, plain: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self._calls, self._loss = 0, None
        with _without_backward(self._trainer.accelerator):
            self._is_asked = True
            try:
                plain(model, inputs, *args, **kwargs)
            finally:
                self._is_asked = False
        if self._calls != 1:
            raise self._refusal(f"calls compute_loss {self._calls} times")
        # A collected batch has no loss yet: the step's loss covers all batches.
        loss = torch.zeros(()) if self._loss is None else self._loss
        return loss.to(self._trainer.args.device)

    def _compute_loss(
        self, plain: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not self._is_asked:  # in an evaluation, or inside zo_step
            return plain(model, inputs, *args, **kwargs)
        self._calls += 1
        if self._calls > 1:
            raise self._refusal("calls compute_loss twice")
        if kwargs.get("return_outputs", bool(args and args[0])):
            raise self._refusal("calls compute_loss with return_outputs=True")
        share = self._share(kwargs.get("num_items_in_batch", args[1] if len(args) > 1 else None))

        def loss_of() -> float:
            # compute_loss may remove the labels from its inputs, so pass a copy.
            return float(plain(model, copy.copy(inputs), *args, **kwargs)) / share

        self._kept.append(loss_of)
        if not self._trainer.accelerator.sync_gradients:
            return torch.zeros(())
        parts, self._kept = self._kept, []
        self._is_asked = False
        self._loss = self._model.zo_step(lambda: sum(part() for part in parts))
        self._is_asked = self._is_made = True
        return self._loss

    def _share(self, num_items: Any) -> int:
        """Return the number by which the Trainer divides a batch's loss before backward."""
        trainer = self._trainer
        is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            counts = trainer.model_accepts_loss_kwargs and num_items is not None
            is_scaled = counts or trainer.compute_loss_func is not None
        return 1 if is_scaled else int(trainer.current_gradient_accumulation_steps)

    def _close(self, plain: Callable[..., Any], closure: Callable[[], Any] | None = None) -> Any:
        """Replace `optimizer.step()`: do nothing if zo_step has already made the step."""
        if closure is not None or not self._is_made:
            return plain(closure)
        self._is_made = False
        return None

    def _refusal(self, what: str) -> Exception:
        name = type(self._trainer).__name__
        return UnsupportedError(
            f'training_step of {name} {what}: with method="mezo" training_step must call'
            " compute_loss exactly once, for the loss alone, because lohan runs compute_loss twice"
            " for each step. Move what training_step does into compute_loss, or call"
            " model.zo_step() in your own training loop"
        )


@contextlib.contextmanager
def _without_backward(accelerator: Any) -> Iterator[None]:
    def backward(loss: Any, **kwargs: Any) -> None:
        if torch.is_tensor(loss) and loss.requires_grad:
            raise StepError(
                "training_step calls backward on a loss that is not compute_loss's, but"
                ' method="mezo" has no backward: add that loss in compute_loss'
            )

    accelerator.backward = backward
    try:
        yield
    finally:
        del accelerator.backward


def _say_unused(args: Any) -> None:
    """Report arguments that were set but have no effect."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name, why in _UNUSED.items():
        value = getattr(args, name, None)
        if value and value != defaults.get(name):
            said = f'{name}={value} has no meaning with method="mezo": {why}'
            _log.note(said)
