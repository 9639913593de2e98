"""Hugging Face's Trainer: `Trainer(..., callbacks=[lohan.TrainerCallback(store=...)])`.

[Note: What a Trainer calls]
A Trainer calls its callbacks after it has acted, but lohan has to act earlier. So at the end of a
Trainer's constructor, the callback replaces methods of that Trainer: `create_optimizer`, so
that the model is wrapped with the parameter groups of the Trainer's AdamW; `_load_from_checkpoint`,
which compares the store with the checkpoint and loads nothing; `log` (_trainer_logs.py); `train`,
because the Trainer resolves resume_from_checkpoint=True to the last folder, even if it is
incomplete; and, in several processes, `_save_checkpoint`, so that all of them commit
(_trainer_world.py); with order= the two methods that _trainer_turns.py names. Clipping, scaling and
schedulers remain the Trainer's own: by default, updates wait for `step()`
(docs/internals/gradients.md, Clipping).

[Note: A checkpoint and its store]
A checkpoint folder contains the small states (scheduler, random generators, position in the data,
scaler), weights for other tools, and a reference in optimizer.pt: the store and the step that hold
the rest. The store commits only when the last file of the folder has been written; the Trainer
deletes older folders after that. Therefore, whenever the process dies, one complete folder is of
the same step as the store's last commit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
import transformers
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME

from lohan.common import _log
from lohan.common._inside import inside
from lohan.common._keywords import flat
from lohan.common._meta import copied_from
from lohan.common._rules import RULES
from lohan.config import SCHEDULES_AT_STEP, Config
from lohan.errors import ModelError, StoreError, StoreMismatchError, UnsupportedError
from lohan.hf import _trainer_args, _trainer_logs, _trainer_turns, _trainer_world, _zo_trainer
from lohan.hf._trainer_folders import (
    checkpoints,
    fits,
    fitting_beside,
    is_finished,
    reference_of,
    sync,
    trained_past,
    way_back,
)
from lohan.opening import _combination
from lohan.session import _adopt, _wear
from lohan.store import _store
from lohan.store._directories import directories_of
from lohan.store._stale import stores_of
from lohan.torch_glue import _device
from lohan.wrap import wrap_flat

if TYPE_CHECKING:
    from lohan.common._keywords import OfCallback
    from lohan.hf._trainer_folders import Reference
    from lohan.session._session import Session
    from lohan.session._training import Training
    from lohan.wrap import PathLike

# Keywords of wrap() that a callback takes as well.
_OF_WRAP = ("weights", "init", "blocks", "states", "experts", "idle")  # moments= is states here
# The methods of a Trainer that the callback replaces.
_SHADOWED = (
    *("create_optimizer", "_load_from_checkpoint", "train", "_save_checkpoint", "log"),
    *_trainer_turns.REPLACED,
)


class TrainerCallback(transformers.TrainerCallback):
    """Train a Trainer's model with its parameters, master copies and Adam moments on SSD.

    `Trainer(model, args, callbacks=[lohan.TrainerCallback(store="/nvme0/run")])` is all you need.
    Pass the callback to the constructor of any class derived from transformers.Trainer. The model
    is wrapped when `train()` begins and stays wrapped: `evaluate`, `predict` and `save_model` still
    work afterwards.

    A model without storage (`lohan.empty()`), or larger than the GPU, needs `lohan.Trainer`, or
    `class T(lohan.TrainerMixin, SFTTrainer)`, because other Trainers first move it to the device.
    To use a model that is already wrapped, with `lohan.wrap(schedule="deferred",
    gradient_accumulation_steps=...)`, pass it to any Trainer as `Trainer(model,
    optimizers=(model.optimizer, None))` without the callback.

    Attributes:
        session: the wrapped model's session; None before `train()`.
    """

    def __init__(
        self,
        store: PathLike | list[PathLike] | tuple[PathLike, ...] | None = None,
        **settings: Unpack[OfCallback],
    ) -> None:
        """Set the store and the other arguments of lohan.wrap().

        Args:
            store: a directory, or a list with one directory per disk. None: the directory "lohan"
                in the Trainer's output_dir.
            **settings: settings of lohan.wrap (host_bytes=, activations=, ...), weights=, init=,
                blocks=, moments=, experts=, idle=. Without commit_every=, the store commits with
                the Trainer's checkpoints, or at the end of `train()` if there are none. Updates
                wait for the norm of all gradients, which a Trainer computes. With max_grad_norm=0
                in its arguments, schedule="optimized" or "auto" updates without the norm; grad_norm
                is then not logged. method= is an update rule
                (docs/update-rules.md) that TrainingArguments do not have, or zeroth-order training.
                eps= is for the latter (docs/zeroth-order.md), and for Adafactor, whose two numbers
                TrainingArguments do not have.

        Raises:
            ModelError: a setting is unknown, or belongs in TrainingArguments.
        """
        self._is_zeroth = _zo_trainer.is_asked(settings)
        has_eps = self._is_zeroth or _trainer_args.has_own_eps(settings.get("method"))
        own = {"eps"} if has_eps else set()
        for name in sorted(set(settings) & set(_trainer_args.SAID_BY_ARGS) - own):
            raise ModelError(
                f"{name}= cannot be passed to lohan.TrainerCallback: set it in TrainingArguments"
                f" ({_trainer_args.SAID_BY_ARGS[name]})"
            )
        made = flat({**settings}, (*_OF_WRAP, "method", "eps"))
        self._method: str | None = made.get("method")
        if "groups" in made:
            raise UnsupportedError(
                "parallel.groups is not supported by a Trainer, whose checkpoints need all modules"
                " in every process: use lohan.wrap() with a training loop of your own"
            )
        self.session: Session | None = None
        self._training: Training | None = None
        self._store = store
        config = made.pop("config", None) or Config()
        of_rules = [name for rule in RULES.values() for name in rule.defaults]
        others = (*_OF_WRAP, *_zo_trainer.KEYWORDS, *of_rules)
        fields = {name: value for name, value in made.items() if name not in others}
        self._config = dataclasses.replace(config, **fields)
        self._settings = made
        self._trainer: Any = None
        self._model: nn.Module | None = None
        self._steps: _zo_trainer.Steps | None = None  # for zeroth-order training
        self._turns: _trainer_turns.Turns | None = None  # for order= and several micro-batches
        self._logs: _trainer_logs.Logs | None = None
        self._group: _trainer_world.Group | None = None  # if there are several processes
        self._tokens = _trainer_logs.Tokens()
        self._has_optimizer = False
        self._is_fused = False
        self._resumes: bool | str = False  # resume= of wrap()

    # --- Events of the Trainer ----------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the Trainer's arguments, and replace its methods.

        Raises:
            UnsupportedError: names the argument of the Trainer that lohan does not support.
        """
        trainer = _trainer_args.calling_trainer()
        _trainer_args.check_args(
            args, trainer, self._config, is_zeroth=self._is_zeroth, method=self._method
        )
        if self._training is not None:
            raise UnsupportedError(
                "this lohan.TrainerCallback has already trained with another Trainer: create a new"
                " callback, with a separate store, for each Trainer"
            )
        if self._trainer is not None:  # the earlier Trainer cannot train now: on_train_begin()
            for name in _SHADOWED:
                self._trainer.__dict__.pop(name, None)
        self._trainer = trainer
        self._check_place(args)
        has_turns = _trainer_turns.check(args, self._config, is_zeroth=self._is_zeroth)
        self._turns = _trainer_turns.Turns(trainer, self._open) if has_turns else None
        self._logs = _trainer_logs.Logs(trainer, self._open)
        self._has_optimizer = trainer.optimizer is not None
        plain = trainer.create_optimizer
        trainer.create_optimizer = functools.partial(self._create_optimizer, plain)
        trainer._load_from_checkpoint = self._load_from_checkpoint
        trainer.train = functools.partial(self._train, trainer.train)
        self._group = None
        if args.world_size > 1:
            self._group = _trainer_world.Group(trainer, self._directories(), self._config)
            trainer._save_checkpoint = functools.partial(self._save, trainer._save_checkpoint)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Arrange that the store commits together with the Trainer's checkpoints.

        Raises:
            UnsupportedError: the callback was not passed to the Trainer's constructor.
        """
        is_mine = self._trainer is not None and args is self._trainer.args
        if not is_mine or self._training is None:
            raise UnsupportedError(
                "lohan.TrainerCallback was added after the Trainer was created, which is too late."
                " Pass it to the constructor: Trainer(..., callbacks=[lohan.TrainerCallback(...)])"
            )
        if self._logs is not None:
            self._logs.begin()
        if self._steps is not None:
            self._steps.begin()
        if self._turns is not None:
            self._turns.begin()
        self._tokens.begin(state)

        def save_to_json(state: Any, json_path: str) -> None:
            type(state).save_to_json(state, json_path)
            self._saved(Path(json_path), only_model=args.save_only_model)

        state.save_to_json = types.MethodType(save_to_json, state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock of a step."""
        if self._logs is not None:
            self._logs.step_begins()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the scheduler skip a step that overflowed, as with torch's unfused AdamW.

        A GradScaler calls step() of a fused AdamW, and of lohan's optimizer, even after an
        overflow. Accelerate then counts the step, which is right only in place of a fused AdamW.
        """
        if not (self._is_fused or self._is_zeroth) and self._model is not None:
            skipped = self._model.optimizer.was_skipped  # type: ignore[union-attr]
            self._trainer.optimizer._is_overflow |= skipped

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the step; one process saves a checkpoint if `wear_budget` allows no further step."""
        if self._logs is not None:
            self._logs.step_ends()
        self._tokens.note(self._open(), state)
        wear = None if self._training is None else self._training.extensions.get(_wear.Wear)
        if wear is None or not wear.is_spent or self._group is not None:
            return
        if _trainer_args.has_checkpoints(args):
            control.should_save = True
        elif self._training is not None and self._training.commits.by_hand:
            self._training.commit()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Note the loss that the Trainer logs, for `lohan watch`."""
        _trainer_logs.loss(self._open(), logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Commit, unless the Trainer saves checkpoints: commits then have to match checkpoints."""
        assert self._training is not None
        if not _trainer_args.has_checkpoints(args) and self._training.commits.by_hand:
            self._training.commit()

    # --- Replacements for the Trainer's methods -------------------------------------------------

    def _train(
        self, plain: Callable[..., Any], resume_from_checkpoint: Any = None, *args: Any, **kw: Any
    ) -> Any:
        """Call the Trainer's train() after resolving True to the last complete checkpoint."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._last_whole() or True
        try:
            return plain(resume_from_checkpoint, *args, **kw)
        finally:
            if self._model is not None and "lohan" in self._model.__dict__:
                self._model._lohan_guard.only_names = False  # type: ignore[union-attr]

    def _last_whole(self) -> str | None:
        """Return the folder to resume from; None to let the Trainer choose the last one."""
        if self._group is not None:
            chosen, newer = self._group.last(self._open_session())
            is_said = chosen is None or not newer or self._trainer.args.process_index > 0
            return chosen if is_said else _passed_over(newer, Path(str(chosen)))
        found = checkpoints(Path(self._trainer.args.output_dir))
        if not found or (is_finished(found[-1]) and reference_of(found[-1]) is None):
            return None  # the Trainer or _load_from_checkpoint will report the problem
        committed = self._committed()
        for index, folder in reversed(list(enumerate(found))):
            reference = reference_of(folder)
            if any(fits(reference, each) for each in committed) and is_finished(folder):
                return None if folder == found[-1] else _passed_over(found[index + 1 :], folder)
            # A complete folder is not a checkpoint if the store has not committed its step.
            is_newer = reference is not None and any(
                each["store"] in stores_of(reference) and reference["step"] > each["step"]
                for each in committed
            )
            if is_finished(folder) and not is_newer:
                is_last = folder == found[-1] or not self._is_zeroth
                return None if is_last else _passed_over(found[index + 1 :], folder)
        return None

    def _create_optimizer(self, plain: Callable[..., Any], model: Any = None) -> Any:
        trainer = self._trainer
        module = trainer.model
        is_mine = self._model is module and self._training is not None and not self._training.closed
        if "lohan" in module.__dict__ and not is_mine:
            raise UnsupportedError(
                "the model is already wrapped: either do not call lohan.wrap(), which the callback"
                " does, or omit lohan.TrainerCallback, wrap with schedule='deferred' (a Trainer"
                " needs the norm of all gradients), and pass optimizers=(model.optimizer, None)"
            )
        if self._training is not None and not is_mine:
            raise UnsupportedError(
                "train() was called again with another model (model_init=, or a closed session),"
                f" but the store in {self._directories()[0]} has the first model's states. Create a"
                " new Trainer with a new lohan.TrainerCallback"
            )
        made = plain() if model is None else plain(model)
        _trainer_args.prepare_alone(trainer.accelerator)
        if not is_mine:
            made = trainer.optimizer = self._wrap(module, made)
        # Before training, Accelerate and the Trainer inspect all parameters, but read no values.
        module._lohan_guard.only_names = trainer.is_in_train
        return made

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        """Reject a checkpoint that does not match the store; load nothing from a matching one."""
        folder = Path(resume_from_checkpoint)
        if self._group is not None:
            step = self._group.check(folder, self._open_session())
            self._resumes = f"step {step}"
            return
        asked = reference_of(folder)
        if asked is None and not is_finished(folder):
            raise StoreMismatchError(self._unfinished(folder))
        if asked is None:
            raise StoreMismatchError(_trainer_world.without_reference(folder))
        found, *copied = self._committed()
        is_found = any(fits(asked, each) for each in (found, *copied))
        if not (is_found or self._can_take_back(asked, found)):
            raise StoreMismatchError(self._mismatch(folder, asked, found))
        if not is_finished(folder):  # zeroth-order steps are durable before their folder is ready
            raise StoreMismatchError(self._unfinished(folder))
        if not is_found:
            _zo_trainer.take_back(self._directories(), self._config, folder, asked["step"])
        self._resumes = True

    def _save(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the Trainer's _save_checkpoint() in several processes, which commit together."""
        assert self._group is not None
        return self._group.save(self._training, plain, *args, **kwargs)

    # --- Helpers --------------------------------------------------------------------------------

    def _check_place(self, args: Any) -> None:
        """Check that the Trainer will not upload the store.

        With push_to_hub=True, a Trainer uploads its output_dir except "_..." and checkpoints.

        Raises:
            UnsupportedError: the Trainer would upload a directory of the store.
        """
        root = Path(args.output_dir).absolute()
        for directory in map(Path, self._directories() if args.push_to_hub else ()):
            inside = directory.is_relative_to(root) and directory.relative_to(root).parts
            if inside == () or (inside and not inside[0].startswith(("_", "checkpoint-"))):
                raise UnsupportedError(
                    f"push_to_hub=True would upload the store in {directory} with the rest of"
                    " output_dir: pass another place with lohan.TrainerCallback(store=...)"
                )

    def _place(self) -> Any:
        """Return store= as wrap() takes it; the default is in output_dir, which is made."""
        if self._store is not None:
            return self._store
        os.makedirs(self._trainer.args.output_dir, exist_ok=True)
        return Path(self._trainer.args.output_dir) / "lohan"

    def _directories(self) -> list[str]:
        default = Path(self._trainer.args.output_dir) / "lohan"
        return directories_of(default if self._store is None else self._store)

    def _open(self) -> Training | None:
        return None if self._training is None or self._training.closed else self._training

    def _open_session(self) -> Training | None:
        """Return the session if it is open, as in a second train() of one process."""
        session = self._open()
        if session is not None and session.edits.is_pending:
            raise StoreMismatchError(
                "train(resume_from_checkpoint=...) was called in a process that has changed the"
                " model's parameters since (load_best_model_at_end does): start a new process"
            )
        return session

    def _committed(self) -> list[Reference]:
        """Return the reference of the store, then of the stores that it was copied from."""
        session = self._open_session()
        if session is not None:
            return [{"store": session.uuid, "step": session.step}]
        directories = self._directories()
        try:
            store = _store.open_existing(directories, self._config, read_only=True)
        except StoreError as error:
            error.add_note(
                "the checkpoint's tensors are in the store that was passed to lohan.TrainerCallback"
                f" when the checkpoint was saved; store= is now {directories}"
            )
            raise
        try:
            described = store.describe()
            step = _zo_trainer.step_of(store)
            found: Reference = {"store": str(described["uuid"]), "step": step}
            copies = [{"store": uuid, "step": step} for uuid, step in copied_from(store)]
            return [found, *(copy for copy in copies if copy["step"] == found["step"])]
        finally:
            store.close()

    def _can_take_back(self, asked: Reference, found: Reference) -> bool:
        if not self._is_zeroth or found["store"] not in stores_of(asked):
            return False
        if self._open() is not None:
            return False
        base = _zo_trainer.base_of(self._directories(), self._config)
        return bool(base <= asked["step"] < found["step"])

    def _mismatch(self, folder: Path, asked: Reference, found: Reference) -> str:
        place = self._directories()[0]
        text = (
            f"{folder} belongs to step {asked['step']} of store {asked['store']}, but the store in"
            f" {place} is at step {found['step']}"
        )
        if found["store"] not in stores_of(asked):
            text += f" and is a different one, {found['store']}: pass the store= of that run"
            return text
        fitting = fitting_beside(folder, found)
        if fitting:
            text += f". To resume from there: train(resume_from_checkpoint={fitting!r})"
            return text + way_back(folder, asked, found)
        session = self._open()
        if session is not None and asked["step"] < found["step"]:
            way = trained_past(folder, asked["step"], session, self._is_zeroth)
            if way:
                return text + way
        if self._is_zeroth:
            return text + _zo_trainer.way_out(place, found["step"])
        return (
            f"{text}, and no checkpoint beside it is of that step: a store keeps only its last"
            f" commit. lohan.wrap(model, store={place!r}, resume=True) resumes it without a"
            f" Trainer's state; from_pretrained({str(folder)!r}) with a new store starts from the"
            f" checkpoint's weights, with moments of zero{way_back(folder, asked, found)}"
        )

    def _unfinished(self, folder: Path) -> str:
        committed = self._committed()[0]
        fitting = fitting_beside(folder, committed)
        text = f"{folder} is incomplete: the process ended while writing it"
        if fitting:
            return f"{text}. Resume from {fitting}: train(resume_from_checkpoint={fitting!r})"
        if self._is_zeroth:
            place = self._directories()[0]
            text += f"; the store in {place} is at step {committed['step']}"
            return text + _zo_trainer.way_out(place, committed["step"])
        return (
            f"{text}, and no checkpoint beside it is of the step of the store in"
            f" {self._directories()[0]}: pass the store= of that run, or start a new run"
        )

    def _wrap(self, model: nn.Module, made: Any) -> Any:
        """Wrap the model with the Trainer's groups, and return its new optimizer."""
        trainer = self._trainer
        on_device = {p.device.type for p in model.parameters()} - {"cpu", "meta"}
        if on_device:
            model.to("cpu")
        resumes, self._resumes = trainer.state.global_step > 0 and self._resumes, False
        config = self._config
        if self._is_zeroth:
            asked = _zo_trainer.asked(trainer.args, made, resumes=bool(resumes))
        else:
            config, asked = self._asked(made, bool(resumes))
        settings = {**asked, **self._settings}
        settings["device"] = _device.of_trainer(self._config.device, trainer.args.device)
        with _same_generator(), _hint_of_trainer():
            opened = {"store": self._place(), "resume": resumes, "config": config}
            wrap_flat(model, {**opened, **settings})
        ours: Any = model.optimizer
        if self._is_zeroth:
            self._steps = _zo_trainer.Steps(trainer, model)
        else:
            same = {"lr", "weight_decay"} if self._method else made.defaults.keys()
            names = ours.rule.defaults.keys() & same
            ours.defaults.update({name: made.defaults[name] for name in names})
        # Some frameworks make the scheduler for the optimizer that their own method has made.
        made.param_groups = ours.param_groups
        made._opt_called = True  # torch's schedulers would warn that it makes no steps
        self._model = model
        self.session = model.__dict__["lohan"]
        self._training = inside(model)
        return ours

    def _asked(self, made: Any, resumes: bool) -> tuple[Config, dict[str, Any]]:
        """Translate the Trainer's arguments and its optimizer into arguments of lohan.wrap()."""
        args = self._trainer.args
        asked: dict[str, Any] = {}
        if self._config.commit_every == Config().commit_every:
            asked["commit_every"] = "manual"
        config = dataclasses.replace(
            self._config, accumulate=_trainer_args.most_backwards(args), loss_scaling=args.fp16
        )
        if self._is_without_norm(args):
            # The Trainer would otherwise compute the norm to log it, even without clipping.
            self._trainer._get_grad_norm = lambda model, grad_norm=None: grad_norm
        else:
            asked["schedule"] = _trainer_args.schedule_at_step(config.schedule)
        self._is_fused = bool(made.defaults.get("fused"))
        is_new = _adopt.is_torchs(made) and _adopt.moments_count(made) == 0
        is_ours = is_new and not self._has_optimizer
        is_split = self._settings.get("experts") == "apart"  # the groups' members are replaced
        if is_ours and (resumes or is_split or self._method):
            # The checkpoint's hyper-parameters take precedence, as without lohan.
            asked |= self._groups(made, with_numbers=not resumes)
        else:
            asked["optimizer"] = made  # the user's scheduler may refer to it
        return config, asked

    def _groups(self, made: Any, *, with_numbers: bool) -> dict[str, Any]:
        """Return the groups of a Trainer's own optimizer, and the rule, as wrap() takes them."""
        name, kind = _adopt.rule_of(made, None)
        if self._method is None:
            groups = _trainer_args.groups_of(made, RULES[kind], with_numbers=with_numbers)
            asked = {"params": groups, "method": name}
            if kind != name:  # in some of its groups the momentum may be 0
                asked["momentum"] = max(group["momentum"] for group in made.param_groups)
            return asked
        rule, args = RULES[_combination.rule_of(self._method, 0)], self._trainer.args
        if rule.others == kind:
            groups = _trainer_args.groups_of(made, RULES[kind], with_numbers=with_numbers)
            return {"params": _trainer_args.with_matrices(groups, self._trainer.model, rule)}
        groups = _trainer_args.groups_of(made, RULES[kind], with_numbers=with_numbers, other=rule)
        asked = {"params": groups}
        if with_numbers:
            asked |= _trainer_args.numbers_of(args, rule)
        return asked

    def _is_without_norm(self, args: Any) -> bool:
        """Return whether updates may precede `step()`: the user chose such a schedule."""
        asked = self._settings.get("schedule")
        if asked is None or asked in SCHEDULES_AT_STEP:
            return False
        if args.max_grad_norm:
            raise UnsupportedError(
                f"schedule={asked!r} updates before the norm of all gradients is known, and"
                f" max_grad_norm={args.max_grad_norm} clips by it: omit schedule=, or set"
                " max_grad_norm=0.0 in TrainingArguments"
            )
        return args.gradient_accumulation_steps == 1 and not args.fp16

    def _saved(self, path: Path, *, only_model: bool) -> None:
        """Commit after the last file of a checkpoint: [Note: A checkpoint and its store]."""
        assert self._training is not None
        folder = path.parent
        if only_model or path.name != TRAINER_STATE_NAME or self._training.closed:
            return
        mine = {"store": self._training.uuid, "step": self._training.step}
        is_due = self._group is None or self._group.is_due
        if not is_due or not fits(reference_of(folder), mine):
            return  # a trainer_state.json that is not part of this checkpoint
        sync(folder)
        if self._group is None:
            self._training.commit()
        else:
            self._group.commit(self._training, is_ready=True)


class TrainerMixin:
    """A mixin for subclasses of transformers.Trainer: `class T(lohan.TrainerMixin, SFTTrainer)`.

    The constructor does not move the model to the device, so a model without storage, or larger
    than the GPU, reaches `train()`, where lohan.TrainerCallback wraps it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        callbacks = self.callback_handler.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, TrainerCallback) for callback in callbacks):
            raise ModelError(
                f"{type(self).__name__} needs callbacks=[lohan.TrainerCallback(store=...)]: it"
                " leaves the model's placement to lohan"
            )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: lohan places parameters itself."""


class Trainer(TrainerMixin, transformers.Trainer):
    """A transformers.Trainer whose constructor does not move the model to the device."""


def _passed_over(unfinished: list[Path], folder: Path) -> str:
    _log.note(
        f"{', '.join(str(path) for path in unfinished)}: the process ended while writing"
        f" this checkpoint, and the store does not have its step: resuming from {folder}"
    )
    return str(folder)


@contextlib.contextmanager
def _same_generator() -> Iterator[None]:
    """Return a context that restores torch's generator: a Trainer itself does so only later."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


@contextlib.contextmanager
def _hint_of_trainer() -> Iterator[None]:
    """Return a context that adds advice for users of a Trainer to errors of wrap()."""
    try:
        yield
    except StoreError as error:
        if re.search(r"resume=True", str(error)):
            error.add_note(
                "with a Trainer, use train(resume_from_checkpoint=True) instead of resume=True if a"
                " checkpoint was saved; otherwise delete the store's directory, or pass another"
            )
        raise
