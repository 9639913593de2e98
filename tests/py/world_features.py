"""What each process of tests/py/test_features_of_processes.py does, besides world_adamw.py."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import lohan
import torch
from experts_helper import HYPER, qwen
from experts_helper import loss_of as mixed_loss
from lohan.common._inside import inside
from lohan.errors import LohanError, NonFiniteError
from world_adamw import build, one_step, states_digest, values_digest, wrapped
from world_worker import rank_and_count

MIXED = 4  # micro-batches of a step of a mixture, of all processes together


def differing(store: str, rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Wrap models with settings in which rank 1 differs; return the errors."""
    rank, _ = rank_and_count()
    said = []
    for number, settings in enumerate(rows):
        try:
            wrapped(f"{store}-{number}", **settings[rank]).lohan.close()
            said.append("")
        except LohanError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def _bad_step(model: Any, before_step: Any = None) -> None:
    """Make a step in which one gradient of micro-batch 5 of all processes is not finite."""
    rank, count = rank_and_count()
    left = 5 // count

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal left
        left -= 1
        return gradient * float("nan" if left == -1 else "1")

    handle = model.layers[1].weight.register_hook(spoil) if 5 % count == rank else None
    try:
        one_step(model, before_step=before_step)
    finally:
        if handle is not None:
            handle.remove()


def skip(store: str, settings: dict[str, Any], clips: bool = False) -> tuple[int, list[bool], str]:
    """Make five steps, the second of which is skipped; return what was skipped, and the states.

    A step that raises NonFiniteError instead is discarded with zero_grad(), as the error says.

    Args:
        store: the store.
        settings: further settings of wrap().
        clips: whether torch clips the gradients before each step.
    """
    model, skipped = wrapped(store, **settings), []

    def clip() -> None:
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    for attempt in range(5):
        model.optimizer.was_skipped = False
        try:
            (_bad_step if attempt == 1 else one_step)(model, before_step=clip)
            skipped.append(model.optimizer.was_skipped)
        except NonFiniteError:
            model.optimizer.zero_grad()
            skipped.append(True)
    result = model.lohan.step, skipped, states_digest(model)
    model.lohan.close()
    return result


def die_in_skip(store: str) -> None:
    """Rank 1 is killed when it discards the step that all skip."""
    rank, _ = rank_and_count()
    model = wrapped(store, on_nan="skip")
    one_step(model)
    if rank == 1:
        inside(model).open_step.discard = lambda: os._exit(9)
    _bad_step(model)
    one_step(model)


def averages(store: str) -> tuple[str, str]:
    """Train, and evaluate the averages in rank 0 alone after the third of four steps.

    Returns:
        A hash of the averages that the model had, and one of all states at the end.
    """
    rank, _ = rank_and_count()
    model, seen = wrapped(store, torch.bfloat16, ema=0.9, commit_every=2), ""
    for step in range(4):
        one_step(model, torch.bfloat16)
        if step != 2:
            continue
        try:
            if rank == 0:
                with lohan.ema(model):
                    seen = values_digest(model)
        except LohanError as error:
            seen = f"{type(error).__name__}: {error}"
    result = seen, states_digest(model)
    model.lohan.close()
    return result


def experts(
    store: str, steps: int, trains: bool, settings: dict[str, Any], copy: str = ""
) -> tuple[int, str, list[float]]:
    """Train a mixture with experts apart, or the rest of it; return step, values and losses.

    Each micro-batch has tokens for few of the experts.

    Args:
        store: the store.
        steps: the number of steps.
        trains: whether the experts are trained.
        settings: further settings of wrap().
        copy: where to copy the store before the experts are read, or "".
    """
    rank, count = rank_and_count()
    torch.manual_seed(0)
    model: Any = qwen().train()
    for name, param in model.named_parameters():
        param.requires_grad_(trains or ".experts." not in name)
    settings = {
        "accumulate": MIXED // count,
        "experts": "apart",
        "peer_timeout_s": 60,
        **({} if settings.get("resume") else HYPER),
        **settings,
    }
    model, losses = lohan.wrap(model, store=store, **settings), []
    while model.lohan.step < steps:
        for number in range(rank, MIXED, count):
            loss = mixed_loss(model, MIXED * model.lohan.step + number)
            loss.backward()
            losses.append(loss.item())
        inside(model).open_step.close(unscale=count / MIXED)
    if settings.get("gather") == "shards":
        model.lohan.flush()
        assert any(nbytes for link, nbytes in model.lohan.stats().bytes.items() if "gather" in link)
    if copy:
        model.lohan.snapshot(copy).wait()
    values = {name: value for name, value in model.state_dict().items()}
    found = hashlib.sha256()
    for name in sorted(values):
        found.update(values[name].contiguous().view(torch.uint8).numpy().tobytes())
    result = model.lohan.step, found.hexdigest()[:16] + states_digest(model), losses
    if inside(model).peers.world is not None:
        inside(model).part()
    model.lohan.close()
    return result


def averages_of_one_block(store: str) -> str:
    """Train a model of which one process has all states; return what lohan.ema() says."""
    model = build()
    for part in (model.begin, model.end, *model.layers[1:]):
        part.requires_grad_(False)
    wrapped_one = lohan.wrap(model, store=store, ema=0.9, replicas="parameters")
    said = ""
    try:
        with lohan.ema(wrapped_one):
            pass
    except LohanError as error:
        said = f"{type(error).__name__}: {error}"
    wrapped_one.lohan.close()
    return said
