"""Defaults change no number, and training does not delay other work in its process."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import threading
import time

import kit as helper
import lohan
import torch
from lohan.common._rules import ADAMW
from torch import nn

STEPS = 4
WAIT_S = 1.0


def test_hyper_parameters_are_adamws_and_nothing_is_clipped(store_dir: pathlib.Path) -> None:
    """Run without any setting: AdamW on unchanged gradients, with torch's own defaults."""
    torchs = inspect.signature(torch.optim.AdamW).parameters
    assert {name: torchs[name].default for name in ADAMW.defaults} == ADAMW.defaults
    plain, model = helper.build("gpt2", torch.float32), helper.build("gpt2", torch.float32)
    model = lohan.wrap(model, store=store_dir / "run")
    states = {name: helper.State.of(param.data) for name, param in plain.named_parameters()}
    norms = []
    for step in range(STEPS):
        for each in (plain, model):
            (100 * helper.language_loss(each, step)).backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in plain.parameters()])))
        for name, param in plain.named_parameters():
            states[name].update(param.grad, **ADAMW.defaults)
            param.grad = None
        model.optimizer.step()
    assert min(norms) > 10, "clipping at 1 would not have been seen"
    for name, param in model.named_parameters():
        assert torch.equal(param, states[name].param), name
    model.lohan.close()


def test_no_setting_of_config_is_part_of_the_rule() -> None:
    """Settings that change numbers are arguments of wrap() itself, and None by default."""
    rule = {"lr", "betas", "eps", "weight_decay", "max_grad_norm", "params", "optimizer"}
    given = inspect.signature(lohan.wrap).parameters
    assert all(given[name].default is None for name in rule)
    settings = {field.name for field in dataclasses.fields(lohan.Config)}
    assert not settings & (rule | set(ADAMW.defaults)), "a setting that is part of the rule"


def ticks_while_training_waits(store: pathlib.Path) -> int:
    """Return how often another thread ran while a forward waited for its block."""
    model = nn.Sequential(nn.Linear(512, 512, bias=False))
    link = int(512 * 512 * 4 / WAIT_S)  # loading the only block takes WAIT_S
    settings = {"device": "emu", "emu_bytes_per_s": (link, 1 << 40)}
    model = lohan.wrap(model, store=store, **settings)
    is_over = threading.Event()
    ticks = []

    def tick() -> None:
        while not is_over.wait(0.01):
            ticks.append(time.monotonic())

    other = threading.Thread(target=tick)
    other.start()
    try:
        began = time.monotonic()
        model(torch.ones(1, 512))
        ended = time.monotonic()
    finally:
        is_over.set()
        other.join()
        model.lohan.close()
    assert ended - began > 0.8 * WAIT_S, "nothing had to be waited for"
    return sum(began < at < ended for at in ticks)


def test_other_threads_run_on_while_training_waits(store_dir: pathlib.Path) -> None:
    """A machine that stands still may stop the other thread once; Python's lock always does."""
    ticks = [ticks_while_training_waits(store_dir / "first")]
    if ticks[0] <= 10:
        ticks += [ticks_while_training_waits(store_dir / name) for name in ("second", "third")]
    assert max(ticks) > 10, "Python's lock was held while the block came in"
