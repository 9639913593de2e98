"""Zeroth-order training by a Trainer: `lohan.TrainerCallback(store=..., method="mezo")`.

[Note: Where a Trainer's step is] A Trainer's loop prepares a batch, computes its loss, goes
backward, and later calls step(). Zeroth-order training has all of that in one: two losses of the
same batch. So the loop runs as it is, its class's training_step with it, and three things in it are
others: the loss that training_step asks for is what zo_step makes of two losses, each computed by
the Trainer's own compute_loss; backward does nothing; and the step() behind it has been made
already. Of batches that are accumulated all but the last are kept, and the loss of a step is the
sum of what a backward through each would have begun with.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lohan.common import _meta
from lohan.errors import ModelError, StepError, UnsupportedError
from lohan.journal import _journal
from lohan.journal._zo_run import uuid_of
from lohan.mezo._zo_setup import METHODS, OF_METHOD
from lohan.store import _store

if TYPE_CHECKING:
    from lohan import _core
    from lohan.config import Config

# What lohan.wrap() takes of method="mezo" alone, and what means something else there.
KEYWORDS = ("method", "eps", *OF_METHOD)

# TrainingArguments that such a step has no use for.
_UNUSED = {
    "max_grad_norm": "there are no gradients to clip",
    "adam_beta1": "there are no moments",
    "adam_beta2": "there are no moments",
    "adam_epsilon": "eps= of lohan.TrainerCallback is how far parameters are moved",
    "neftune_noise_alpha": "a step runs the model in evaluation mode, without noise",
}


def is_asked(settings: dict[str, Any]) -> bool:
    """The callback is asked for zeroth-order training.

    Raises:
        ModelError: for a method that there is not, or for what belongs to one that it is not.
    """
    method = settings.get("method", METHODS[0])
    if method not in METHODS:
        raise ModelError(f"method {method!r}: one of {', '.join(METHODS)}")
    for name in OF_METHOD:
        if name in settings and method != "mezo":
            raise ModelError(f'{name}= is only valid with method="mezo"')
    return bool(method == "mezo")


def check(args: Any, trainer: Any, optimizers: tuple[str, ...]) -> None:
    """Refuse what cannot be had without backward.

    Args:
        args: TrainingArguments.
        trainer: with these.
        optimizers: values of optim= that say nothing.

    Raises:
        UnsupportedError: says which, why, and what to do.
    """
    if args.load_best_model_at_end:
        raise UnsupportedError(
            'load_best_model_at_end=True: with method="mezo" only steps change parameters. Leave it'
            ' out; with save_strategy="best" and metric_for_best_model= the best folder stays, and'
            " from_pretrained(trainer.state.best_model_checkpoint) has it"
        )
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        raise UnsupportedError(
            'optimizers= or optimizer_cls_and_kwargs= of the Trainer: method="mezo" is a rule of'
            " its own, whose learning rate and weight decay TrainingArguments say: leave it out"
        )
    optim = getattr(args.optim, "value", args.optim)
    if optim not in optimizers:
        raise UnsupportedError(
            f'optim={str(optim)!r}: method="mezo" is a rule of its own: leave optim out'
        )


def asked(args: Any, made: torch.optim.Optimizer, *, resumes: bool) -> dict[str, Any]:
    """What the Trainer's arguments, and the optimizer that it has made, say to lohan.wrap().

    A run that goes on has its rule and its numbers.
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
    """The last step of a store: that of its commit, or, by a journal, the one that it leads to."""
    said = store.describe()
    if _meta.of(store).get("method") is None:
        return int(said["step"])
    directories = [os.path.dirname(path) for path, _, _ in said["files"]]
    return len(_journal.read(directories, uuid_of(store))[1])


def base_of(directories: Sequence[str], config: Config) -> int:
    """The step of a store's last commit, which its journal leads on from."""
    store = _store.open_existing(directories, config, read_only=True)
    try:
        return int(store.describe()["step"])
    finally:
        store.close()


def take_back(directories: Sequence[str], config: Config, folder: Path, step: int) -> None:
    """A run that died behind a checkpoint goes on from there: later steps are made again.

    Args:
        directories: of the store.
        config: of the session that will go on.
        folder: of the checkpoint.
        step: that it is of; not before the store's last commit.
    """
    store = _store.open_existing(directories, config)  # not for reading: nobody else trains
    try:
        end, kept = _journal.cut(directories, uuid_of(store), step)
    finally:
        store.close()
    print(
        f"lohan: the store is at step {end}, and {folder} at step {step}: the steps between them"
        f" are taken back, and made again (the journal as it was is {kept})",
        file=sys.stderr,
    )


def way_out(place: str, step: int) -> str:
    """For a checkpoint that is not of the store's last step, and none beside it is."""
    return (
        ": parameters of a later step were written since (write_every=), and none is taken back."
        f" lohan.export({place!r}, OUT, dtype='float32') has the parameters of step {step}, for a"
        f' Trainer with a new store; lohan.wrap(model, store={place!r}, method="mezo", resume=True)'
        " goes on from that step in a loop of your own"
    )


class Steps:
    """What a Trainer's methods do where its model has no backward.

    [Note: Where a Trainer's step is].
    """

    def __init__(self, trainer: Any, model: Any) -> None:
        """Be there in place of the methods of one Trainer, whose model is wrapped."""
        self._trainer = trainer
        self._model = model
        self._kept: list[Callable[[], float]] = []
        self._calls = 0  # of compute_loss, by one training_step
        self._is_asked = False  # a training_step runs, and nothing that it has called
        self._loss: torch.Tensor | None = None
        self._is_made = False  # a step, for which step() is still to be called
        trainer.training_step = functools.partial(self._training_step, trainer.training_step)
        trainer.compute_loss = functools.partial(self._compute_loss, trainer.compute_loss)
        # None of both is logged.
        trainer._clip_grad_norm = lambda model: None
        trainer._get_grad_norm = lambda model, grad_norm=None: None
        model.optimizer.step = functools.partial(self._close, model.optimizer.step)
        _say_unused(trainer.args)

    def begin(self) -> None:
        """A training begins; what another one left of a step is not its own."""
        self._kept.clear()
        self._is_made = False
        # Losses of fp16 are not scaled where no gradient could vanish.
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
        # A batch that is kept has no loss yet: the step's is that of all.
        loss = torch.zeros(()) if self._loss is None else self._loss
        return loss.to(self._trainer.args.device)

    def _compute_loss(
        self, plain: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not self._is_asked:  # an evaluation, or one of the two runs
            return plain(model, inputs, *args, **kwargs)
        self._calls += 1
        if self._calls > 1:
            raise self._refusal("calls compute_loss twice")
        if kwargs.get("return_outputs", bool(args and args[0])):
            raise self._refusal("asks for the model's outputs, of which there are two,")
        share = self._share(kwargs.get("num_items_in_batch", args[1] if len(args) > 1 else None))

        def loss_of() -> float:
            # A copy: compute_loss may take the labels out.
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
        """What the Trainer divides the loss of one of several batches by, ahead of backward."""
        trainer = self._trainer
        is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            counts = trainer.model_accepts_loss_kwargs and num_items is not None
            is_scaled = counts or trainer.compute_loss_func is not None
        return 1 if is_scaled else int(trainer.current_gradient_accumulation_steps)

    def _close(self, plain: Callable[..., Any], closure: Callable[[], Any] | None = None) -> Any:
        """`optimizer.step()`: the step is made already."""
        if closure is not None or not self._is_made:
            return plain(closure)
        self._is_made = False
        return None

    def _refusal(self, what: str) -> Exception:
        name = type(self._trainer).__name__
        return UnsupportedError(
            f'training_step of {name} {what}: with method="mezo" a Trainer\'s step is the loss that'
            " compute_loss gives, computed twice for one batch. Put what it does into compute_loss,"
            " or call model.zo_step() in a loop of your own"
        )


@contextlib.contextmanager
def _without_backward(accelerator: Any) -> Iterator[None]:
    def backward(loss: Any, **kwargs: Any) -> None:
        if torch.is_tensor(loss) and loss.requires_grad:
            raise StepError(
                'backward of a loss that is not compute_loss\'s: with method="mezo" there is none'
            )

    accelerator.backward = backward
    try:
        yield
    finally:
        del accelerator.backward


def _say_unused(args: Any) -> None:
    """Arguments that somebody has set, and that mean nothing here."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name, why in _UNUSED.items():
        value = getattr(args, name, None)
        if value and value != defaults.get(name):
            said = f'lohan: {name}={value} has no meaning with method="mezo": {why}'
            print(said, file=sys.stderr)
