"""What the arguments of a Trainer mean for lohan, and which of them it rejects."""

from __future__ import annotations

import sys
import types
from typing import Any

import transformers

from lohan.config import SCHEDULES_AT_STEP
from lohan.errors import UnsupportedError
from lohan.session._optim import DEFAULTS, RULE, check_rule
from lohan.world._rendezvous import process_count

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")

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


def check_args(args: Any, trainer: Any) -> None:
    """Reject arguments that lohan does not support.

    Raises:
        UnsupportedError: names the argument, the reason, and what to do instead.
    """
    if args.torch_compile:
        raise UnsupportedError(
            "torch_compile=True is not supported: lohan loads and evicts parameters during a step,"
            " which torch.compile cannot trace. Leave torch_compile out"
        )
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name, None):
            raise UnsupportedError(
                f"{name}= places parameters and optimizer states itself, as lohan does: omit either"
                f" {name}= or the callback"
            )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name, False):
            raise UnsupportedError(
                f"{name}=True changes the dtype of the parameters, which are in the store: leave it"
                " out; evaluation already runs under the autocast of bf16= or fp16="
            )
    check_processes(args, trainer)
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"the Trainer would run on {args.n_gpu} GPUs (DataParallel); lohan trains on one: set"
            " CUDA_VISIBLE_DEVICES=0"
        )
    is_given = trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None
    optim = getattr(args.optim, "value", args.optim)
    if not is_given and optim not in OPTIMIZERS:
        raise UnsupportedError(
            f"optim={str(optim)!r} is not supported: lohan runs AdamW in fp32, on SSD. Use"
            f" optim={OPTIMIZERS[0]!r} or {OPTIMIZERS[1]!r}, the default"
        )


def check_processes(args: Any, trainer: Any) -> None:
    """Reject what several processes cannot do, and processes that the Trainer does not know.

    Raises:
        UnsupportedError: names the argument or the variable, and what to do instead.
    """
    for name in ("deepspeed", "fsdp"):  # a configuration of `accelerate launch` sets them, too
        if getattr(trainer, f"is_{name}_enabled", False):
            raise UnsupportedError(
                f"accelerate was started with {name}, which places parameters and optimizer states"
                " itself, as lohan does: leave it out of the configuration of `accelerate launch`"
            )
    if args.world_size != process_count():
        raise UnsupportedError(
            f"WORLD_SIZE is {process_count()}, but the Trainer runs in {args.world_size}"
            " process(es): start the script with torchrun, which sets RANK, LOCAL_RANK and the"
            " other variables that the Trainer needs"
        )
    plan = getattr(trainer.accelerator, "parallelism_config", None)
    for kind in ("tp", "cp", "sp"):
        if plan is not None and getattr(plan, f"{kind}_size", 1) > 1:
            raise UnsupportedError(
                f"{kind}_size={getattr(plan, f'{kind}_size')} in parallelism_config divides a model"
                " or its batches among processes, but with lohan each process trains the whole"
                " model on batches of its own: leave it out"
            )
    if args.world_size > 1 and args.enable_jit_checkpoint:
        raise UnsupportedError(
            "enable_jit_checkpoint=True saves when a process receives SIGTERM, so several processes"
            " would save different steps: leave it out, or start one process"
        )


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


def groups_of(optimizer: Any, *, with_numbers: bool) -> list[dict[str, Any]]:
    """Return the parameter groups of an AdamW for wrap(params=).

    Args:
        optimizer: an AdamW that has made no step.
        with_numbers: whether the groups keep their hyper-parameters.

    Raises:
        UnsupportedError: a group uses another update rule.
    """
    for group in optimizer.param_groups:
        check_rule(group)
    dropped = RULE if with_numbers else (*DEFAULTS, *RULE)
    return [
        {key: value for key, value in group.items() if key not in dropped}
        for group in optimizer.param_groups
    ]


def has_checkpoints(args: Any) -> bool:
    """Return whether the Trainer saves checkpoints that it can resume from."""
    strategy = getattr(args.save_strategy, "value", args.save_strategy)
    return (strategy != "no" or bool(args.enable_jit_checkpoint)) and not args.save_only_model


def schedule_at_step(schedule: str) -> str:
    return schedule if schedule in SCHEDULES_AT_STEP else "deferred"
