"""Update rules of a Trainer: method= of the callback, and optim= of TrainingArguments."""

from __future__ import annotations

import pathlib
from typing import Any

import lohan
import pytest
import torch
import trainer_helper as helper
from lohan.common._inside import inside
from lohan.errors import ModelError, UnsupportedError
from trainer_resume_helper import ARGUMENTS, Dies

pytestmark = pytest.mark.usefixtures("closed")


class Ended(Exception):
    """A test has ended a training."""


def end() -> None:
    raise Ended


class Lion(torch.optim.Optimizer):
    """Lion as lion-pytorch writes it."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(
                    m.clone().mul_(beta1).add_(p.grad, alpha=1 - beta1).sign_(), alpha=-group["lr"]
                )
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Makes(helper.Trainer):  # type: ignore[misc]
    """Trains by another rule, with the groups of a Trainer's own optimizer."""

    kind: Any

    def create_optimizer(self, model: Any = None) -> Any:
        """Take groups, learning rate and weight decay of the Trainer's own optimizer."""
        groups = super().create_optimizer(model).param_groups
        kept = ("params", "lr", "weight_decay")
        self.optimizer = self.kind([{key: group[key] for key in kept} for group in groups])
        return self.optimizer


def losses_of(folder: pathlib.Path, takes: Any, kind: Any = None, **more: Any) -> list[float]:
    cls = helper.Trainer if kind is None else type("Made", (Makes,), {"kind": staticmethod(kind)})
    trainer = helper.make(folder, takes, cls=cls, **more)
    trainer.train()
    return helper.logged(trainer, "loss")


RULES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "lion": ("lion", lambda groups: Lion(groups, betas=(0.9, 0.99)), {}),
    "lion, its betas": (
        "lion",
        lambda groups: Lion(groups, betas=(0.8, 0.9)),
        {"adam_beta1": 0.8, "adam_beta2": 0.9},
    ),
    "adam": ("adam", lambda groups: torch.optim.Adam(groups, eps=1e-6), {"adam_epsilon": 1e-6}),
    "sgd": ("sgd", torch.optim.SGD, {"learning_rate": 0.1}),
    "adafactor, its eps": (
        {"method": "adafactor", "eps": (1e-2, 1e-3)},
        lambda groups: torch.optim.Adafactor(groups, eps=(1e-2, 1e-3)),
        {"learning_rate": 0.01},
    ),
    "momentum": (
        lohan.SGD(momentum=0.9, nesterov=True),
        lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
        {"learning_rate": 0.1},
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_trainer_trains_by_the_callbacks_rule_with_its_own_groups_and_rates(
    name: str, store_dir: pathlib.Path
) -> None:
    method, kind, more = RULES[name]
    expected = losses_of(store_dir / "without", None, kind, **more)
    takes = method if isinstance(method, dict) else {"method": method}
    found = losses_of(store_dir / "with", takes, **more)
    assert len(set(expected)) == 6
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_trainers_groups_are_divided_into_matrices_and_the_rest(
    store_dir: pathlib.Path,
) -> None:
    """Muon has the groups' rate and weight decay; the rest also has the numbers of AdamW."""
    numbers = {"adam_beta2": 0.95, "adam_epsilon": 1e-6}
    takes = {"method": lohan.Muon(adjust_lr_fn="match_rms_adamw")}
    model = helper.llama()
    named = dict(model.named_parameters())
    is_matrix = {name: p.dim() == 2 and ".layers." in name for name, p in named.items()}
    assert 0 < sum(is_matrix.values()) < len(named) - 2
    of_adamw = {"betas": (0.9, 0.95), "eps": 1e-6}
    groups = [
        {"params": [p for n, p in named.items() if is_matrix[n]], "use_muon": True},
        {"params": [named[n] for n in ("model.embed_tokens.weight", "lm_head.weight")], **of_adamw},
        {
            "params": [p for p in named.values() if p.dim() == 1],
            "weight_decay": 0.0,
            **of_adamw,
        },
    ]
    model = lohan.wrap(
        model,
        params=[{"use_muon": False, **group} for group in groups],
        lr=3e-3,
        weight_decay=0.1,
        schedule="deferred",
        store=store_dir / "wrapped",
        **takes,
    )
    given = {"optimizers": (model.optimizer, None)}
    expected = losses_of(store_dir / "given", None, model=model, trainer_takes=given, **numbers)
    assert losses_of(store_dir / "with", takes, **numbers) == expected


@pytest.mark.parametrize(
    "more",
    [
        {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.1},
        {"optim": "adagrad", "learning_rate": 0.01},
        {"optim": "rmsprop", "learning_rate": 0.001},
    ],
    ids=["sgd", "adagrad", "rmsprop"],
)
def test_the_optimizer_of_training_arguments_trains_as_without_lohan(
    more: dict[str, Any], store_dir: pathlib.Path
) -> None:
    expected = losses_of(store_dir / "without", None, **more)
    assert losses_of(store_dir / "with", {}, **more) == pytest.approx(expected, rel=1e-4)


class Partly(Makes):
    """Trains by SGD with momentum in the second of its groups only."""

    @staticmethod
    def kind(groups: list[dict[str, Any]]) -> Any:
        """Return the optimizer."""
        groups[0]["momentum"] = 0.0
        return torch.optim.SGD(groups, momentum=0.9)


@pytest.mark.parametrize(
    ("takes", "more"),
    [
        ({"method": "lion", "moments": "8bit"}, {"adam_beta2": 0.9}),
        ({"method": lohan.SGD(momentum=0.9)}, {}),
        ({"method": "muon"}, {"adam_beta2": 0.9}),
        ({}, {"optim": "adagrad", "optim_args": "lr_decay=0.1,initial_accumulator_value=0.1"}),
        ({}, {"optim": "sgd", "optim_args": "momentum=0.9"}),
        ({}, {"cls": Partly, "learning_rate": 0.1}),
        ({"method": "adafactor", "eps": (1e-5, 1e-3)}, {}),
    ],
    ids=["lion", "momentum", "muon", "adagrad", "optim", "partly", "adafactor"],
)
def test_a_resumed_trainer_keeps_its_rule_and_its_numbers(
    takes: dict[str, Any], more: dict[str, Any], store_dir: pathlib.Path
) -> None:
    def made(name: str, callbacks: tuple[Any, ...] = ()) -> Any:
        return helper.make(store_dir / name, takes, callbacks=callbacks, **{**ARGUMENTS, **more})

    whole = made("whole")
    whole.train()
    with pytest.raises(Ended):
        made("parts", (Dies(4, "done", end),)).train()
    helper.close_all()
    trainer = made("parts")
    trainer.train(resume_from_checkpoint=True)
    assert inside(trainer.model).layout.rule == inside(whole.model).layout.rule != "adamw"
    assert helper.logged(trainer, "loss") == helper.logged(whole, "loss")
    groups = [
        [{**group, "params": 0} for group in each.optimizer.param_groups]
        for each in (trainer, whole)
    ]
    assert groups[0] == groups[1]


def test_what_chooses_two_rules_is_refused_by_name(store_dir: pathlib.Path) -> None:
    with pytest.raises(UnsupportedError, match=r"method='lion' .*optim='sgd'.*pass one of them"):
        helper.make(store_dir / "a", {"method": "lion"}, optim="sgd")
    kind = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})}
    with pytest.raises(UnsupportedError, match="both choose the update rule"):
        helper.make(store_dir / "b", {"method": "lion"}, trainer_takes=kind)
    model = helper.llama()
    given = {"optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None)}
    trainer = helper.make(store_dir / "c", {"method": "lion"}, model=model, trainer_takes=given)
    with pytest.raises(ModelError, match="method='lion' is not the rule of optimizer=SGD"):
        trainer.train()
    with pytest.raises(ModelError, match="method 'lino' must be one of"):
        lohan.TrainerCallback(method="lino")
