"""What the arguments of a Trainer mean for lohan, and which of them it rejects."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable
from typing import Any

import transformers
from torch import nn

from lohan.common._keywords import flat
from lohan.common._rules import RULES, Rule
from lohan.config import SCHEDULES_AT_STEP, Config
from lohan.errors import UnsupportedError
from lohan.opening import _matrices
from lohan.world._rendezvous import process_count

ADAMWS = ("adamw_torch", "adamw_torch_fused")
# The values of optim= for which a Trainer makes an optimizer of torch whose rule lohan has.
OPTIMIZERS = (*ADAMWS, *(name for name in ("sgd", "adagrad", "rmsprop") if name in RULES))

# Arguments of lohan.wrap() that the callback rejects, and the TrainingArguments to use instead.
SAID_BY_ARGS = {
    "lr": "learning_rate",
    "betas": "adam_beta1 and adam_beta2",
    "eps": "adam_epsilon",
    "weight_decay": "weight_decay",
    "max_grad_norm": "max_grad_norm",
    "accumulate": "gradient_accumulation_steps",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "loss_scaling": "fp16",
    "params": "weight_decay, or Trainer(optimizers=...)",
    "optimizer": "optim, or Trainer(optimizers=...)",
    "resume": "train(resume_from_checkpoint=...)",
    "resume_step": "train(resume_from_checkpoint=...)",
}


def calling_trainer() -> Any:
    """Find the Trainer that calls the callback; the callback's arguments do not include it.

    Raises:
        UnsupportedError: the caller is not a transformers.Trainer.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, transformers.Trainer):
            return found
        frame = frame.f_back
    raise UnsupportedError(
        "lohan.TrainerCallback works only with transformers.Trainer and its subclasses; in your own"
        " training loop, call lohan.wrap(model, ...)"
    )


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a Trainer asks for.

    Attributes:
        args: its TrainingArguments.
        trainer: the Trainer.
        config: the settings of its session.
        is_zeroth: whether it trains without backward.
        method: the update rule that the callback was given; None: it was not.
    """

    args: Any
    trainer: Any
    config: Config
    is_zeroth: bool = False
    method: str | None = None

    @property
    def optim(self) -> str:
        """The name of the optimizer."""
        return str(getattr(self.args.optim, "value", self.args.optim))

    @property
    def has_optimizer(self) -> bool:
        """Whether the Trainer was given an optimizer, or its class."""
        trainer = self.trainer
        return trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None

    @property
    def chooses_rule(self) -> bool:
        """Whether the Trainer was given the kind of an optimizer that it makes."""
        is_made = not self.has_optimizer and self.optim not in ADAMWS
        return is_made or self.trainer.optimizer_cls_and_kwargs is not None

    @property
    def process_count(self) -> int:
        """The number of processes of the run."""
        return process_count()

    @property
    def plan(self) -> Any:
        """The axes of processes that accelerate was given, or None."""
        return getattr(self.trainer.accelerator, "parallelism_config", None)


# Whether a Trainer asks for something, and the message that refuses it; {f...} is one of the facts.
_Row = tuple[Callable[[Asked], Any], str]


def _of_placing(name: str) -> _Row:
    return (
        lambda f: getattr(f.args, name, None),
        f"{name}= places parameters and optimizer states itself, as lohan does: omit either"
        f" {name}= or the callback",
    )


def _of_launch(name: str) -> _Row:  # a configuration of `accelerate launch` sets it, too
    return (
        lambda f: getattr(f.trainer, f"is_{name}_enabled", False),
        f"accelerate was started with {name}, which places parameters and optimizer states itself,"
        " as lohan does: leave it out of the configuration of `accelerate launch`",
    )


def _of_evaluation(name: str) -> _Row:
    return (
        lambda f: getattr(f.args, name, False),
        f"{name}=True changes the dtype of the parameters, which are in the store: leave it out;"
        " evaluation already runs under the autocast of bf16= or fp16=",
    )


def _of_axis(name: str) -> _Row:
    return (
        lambda f: f.plan is not None and getattr(f.plan, name, 1) > 1,
        f"{name}={{f.plan.{name}}} in parallelism_config divides a model or its batches among"
        " processes, but with lohan each process trains the whole model on batches of its own:"
        " leave it out",
    )


_ROWS: tuple[_Row, ...] = (
    # What needs a backward or an optimizer.
    (
        lambda f: f.is_zeroth and f.process_count > 1,
        'WORLD_SIZE is {f.process_count}, but a Trainer with method="mezo" trains in one process:'
        " call model.zo_step() in your own training loop, which works in several",
    ),
    (
        lambda f: f.is_zeroth and f.args.load_best_model_at_end,
        'load_best_model_at_end=True: with method="mezo" only steps can change parameters. Leave it'
        ' out. With save_strategy="best" and metric_for_best_model=, the best checkpoint is kept,'
        " and from_pretrained(trainer.state.best_model_checkpoint) loads it",
    ),
    (
        lambda f: f.is_zeroth and f.has_optimizer,
        "optimizers= and optimizer_cls_and_kwargs= of the Trainer cannot be used with"
        ' method="mezo", which has its own update rule: leave them out, and set the learning rate'
        " and weight decay in TrainingArguments",
    ),
    (
        lambda f: f.is_zeroth and f.optim not in ADAMWS,
        'optim={f.optim!r} cannot be used with method="mezo", which has its own update rule: leave'
        " optim out",
    ),
    (
        lambda f: not f.is_zeroth and f.config.clip == "repeat",
        "IO(clip='repeat') is not supported by a Trainer, which computes the norm of all gradients"
        " itself, before any update: leave clip= out",
    ),
    # What changes parameters where lohan does not see it.
    (
        lambda f: f.args.torch_compile,
        "torch_compile=True is not supported: lohan loads and evicts parameters during a step,"
        " which torch.compile cannot trace. Leave torch_compile out",
    ),
    *map(_of_placing, ("deepspeed", "fsdp")),
    *map(_of_evaluation, ("bf16_full_eval", "fp16_full_eval")),
    # What several processes cannot do, and processes that the Trainer does not know.
    *map(_of_launch, ("deepspeed", "fsdp")),
    (
        lambda f: f.args.world_size != f.process_count,
        "WORLD_SIZE is {f.process_count}, but the Trainer runs in {f.args.world_size} process(es):"
        " start the script with torchrun, which sets RANK, LOCAL_RANK and the other variables that"
        " the Trainer needs",
    ),
    *map(_of_axis, ("tp_size", "cp_size", "sp_size")),
    (
        lambda f: f.args.world_size > 1 and f.args.enable_jit_checkpoint,
        "enable_jit_checkpoint=True saves when a process receives SIGTERM, so several processes"
        " would save different steps: leave it out, or start one process",
    ),
    (
        lambda f: (
            f.args.world_size > 1 and f.config.share == "on" and f.args.load_best_model_at_end
        ),
        "load_best_model_at_end=True changes parameters after the training, while other processes"
        " read them (Parallel(share=True)): leave it out, and load the folder"
        " trainer.state.best_model_checkpoint with from_pretrained(), or leave share= out",
    ),
    (
        lambda f: f.args.n_gpu > 1,
        "the Trainer would run on {f.args.n_gpu} GPUs (DataParallel); lohan trains on one: set"
        " CUDA_VISIBLE_DEVICES=0",
    ),
    (
        lambda f: not f.has_optimizer and f.optim == "adafactor",
        "optim='adafactor' is not supported: it is transformers' Adafactor, which adds eps to"
        " squares of gradients and takes the learning rate as it is. For the one of torch.optim,"
        ' leave optim= out and pass lohan.TrainerCallback(method="adafactor")',
    ),
    (
        lambda f: not f.has_optimizer and f.optim not in OPTIMIZERS,
        "optim={f.optim!r} is not supported: lohan runs the optimizer itself, in fp32 and on SSD."
        f" Use one of {', '.join(map(repr, OPTIMIZERS))}; for the other rules of"
        ' docs/update-rules.md, leave optim= out and pass lohan.TrainerCallback(method="lion"), for'
        " example",
    ),
    (
        lambda f: f.method is not None and f.chooses_rule,
        "method={f.method!r} of the callback, and optim={f.optim!r} or optimizer_cls_and_kwargs= of"
        " the Trainer, both choose the update rule: pass one of them",
    ),
)


def check_args(
    args: Any, trainer: Any, config: Config, *, is_zeroth: bool, method: str | None
) -> None:
    """Reject arguments that lohan does not support.

    Raises:
        UnsupportedError: names the argument, the reason, and what to do instead.
    """
    asked = Asked(args, trainer, config, is_zeroth, None if is_zeroth else method)
    for is_so, text in _ROWS:
        if is_so(asked):
            raise UnsupportedError(text.format(f=asked))


def prepare_alone(accelerator: Any) -> None:
    """Keep one Accelerator from wrapping lohan's models in DistributedDataParallel.

    lohan's sessions exchange gradients themselves. Accelerate only adds autocast to a model that is
    prepared in evaluation mode.
    """
    plain = accelerator.prepare_model
    if getattr(plain, "is_lohan", False):
        return

    def prepare_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        if "lohan" in model.__dict__:
            kwargs["evaluation_mode"] = True
        return plain(model, *args, **kwargs)

    prepare_model.is_lohan = True  # type: ignore[attr-defined]
    accelerator.prepare_model = prepare_model


def most_backwards(args: Any) -> int:
    """Return the largest number of backwards in a step.

    A step usually has gradient_accumulation_steps backwards. With data of unknown length, an epoch
    may end within a step, and its unfinished step is merged into the first one of the next epoch.
    """
    return 2 * int(args.gradient_accumulation_steps) - 1


def groups_of(
    optimizer: Any, rule: Rule, *, with_numbers: bool, other: Rule | None = None
) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer for wrap(params=).

    Args:
        optimizer: an optimizer of torch that has made no step.
        rule: its update rule.
        with_numbers: whether the groups keep their hyper-parameters.
        other: the rule of the run, if it is not the optimizer's: of the hyper-parameters, only
            learning rate and weight decay mean the same.

    Raises:
        UnsupportedError: a group uses another update rule.
    """
    for group in optimizer.param_groups:
        rule.check_options(group)
    dropped = {*rule.fixed} if with_numbers else {*rule.defaults, *rule.fixed}
    if other is not None:
        dropped |= rule.defaults.keys() - {"lr", "weight_decay"}
    return [
        {key: value for key, value in group.items() if key not in dropped}
        for group in optimizer.param_groups
    ]


def has_own_eps(method: Any) -> bool:
    """Return whether the callback takes the eps of a method=, which TrainingArguments do not."""
    rule = RULES.get(str(flat({"method": method}, ("method",))["method"]))
    return rule is not None and rule.has_factors


def with_matrices(
    groups: list[dict[str, Any]], model: nn.Module, rule: Rule
) -> list[dict[str, Any]]:
    """Divide the groups of an AdamW into those of matrices and those that keep AdamW.

    Args:
        groups: what groups_of() returns for AdamW.
        model: the model.
        rule: the rule of the matrices, whose other hyper-parameters than learning rate and weight
            decay are not those of AdamW.
    """
    hidden = _matrices.hidden(model)
    own = RULES[rule.others].defaults.keys() - {"lr", "weight_decay"}
    made = []
    for group in groups:
        numbers = {key: value for key, value in group.items() if key not in own}
        for is_muon, kept in ((True, numbers), (False, group)):
            members = [p for p in group["params"] if (id(p) in hidden) == is_muon]
            if members:
                made.append({**kept, "params": members, "use_muon": is_muon})
    return made


def numbers_of(args: Any, rule: Rule) -> dict[str, Any]:
    """Return the betas and eps of a Trainer's arguments that are for a rule of method=.

    The defaults of TrainingArguments are those of AdamW; the rule's own take their place.
    """
    fields = type(args).__dataclass_fields__
    names = {"betas": ("adam_beta1", "adam_beta2"), "eps": ("adam_epsilon",)}
    found: dict[str, Any] = {}
    if rule.has_factors:  # its eps are two numbers of another meaning
        return found
    for name in names.keys() & rule.defaults.keys():
        values = tuple(getattr(args, each) for each in names[name])
        if values != tuple(fields[each].default for each in names[name]):
            found[name] = values if name == "betas" else values[0]
    return found


def has_checkpoints(args: Any) -> bool:
    """Return whether the Trainer saves checkpoints that it can resume from."""
    strategy = getattr(args.save_strategy, "value", args.save_strategy)
    return (strategy != "no" or bool(args.enable_jit_checkpoint)) and not args.save_only_model


def schedule_at_step(schedule: str) -> str:
    return schedule if schedule in SCHEDULES_AT_STEP else "deferred"
