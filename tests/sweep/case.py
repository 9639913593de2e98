"""Whether lohan reads, trains and writes one class as its library does, bit for bit."""

from __future__ import annotations

import copy
import math
import pathlib
import shutil
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import forms
import inputs
import lohan
import repair
import tiny
import torch
from lohan.common._inside import inside
from torch import nn

ELEMENTS_MAX = 50_000_000
REPAIRS_MAX = 6
HYPER = {"lr": 1e-3, "weight_decay": 0.01, "allow_tmpfs": True}
SEED = 1234


class NotBuiltError(Exception):
    """The library cannot compute the class from any of the small configurations."""


def build(
    make: Callable[[str], nn.Module],
    check: Callable[..., str] | None = None,
    ways: Sequence[str] = (*tiny.WAYS, *tiny.MORE_WAYS),
) -> str:
    """Build a small model, in the first of the ways with which check(model, inputs) returns "".

    Returns:
        The way in which it was made small.

    Raises:
        NotBuiltError: no way and inputs are known.
    """
    said: list[str] = []
    for way in ways:
        try:
            with torch.device("meta"):
                count = sum(p.numel() for p in make(way).parameters())
            if count > ELEMENTS_MAX:
                said.append(f"{way}: {count} elements")
                continue
            torch.manual_seed(SEED)
            model = make(way).eval()
        except Exception as error:
            said.append(f"{way}: {_short(error)}")
            continue
        by_hand = forms.inputs(type(model).__name__, SEED)
        tries = [by_hand] if by_hand else inputs.candidates(model, model.config, SEED)
        for each in tries:
            left, left_over = _tried(model, each, check), REPAIRS_MAX
            while isinstance(left, Exception) and left_over:
                other = repair.repaired(left, each, model, SEED)
                if other is None:
                    break
                each, left_over = other, left_over - 1
                left = _tried(model, each, check)
            if not left:
                return way
            why = _short(left) if isinstance(left, Exception) else left
            said.append(f"{way}, {', '.join(each)}: {why}")
    # The first reason is that of the smallest form; sizes say nothing about the class.
    other = [each for each in said if not each.endswith(" elements")] or said
    raise NotBuiltError(" | ".join(dict.fromkeys([*other[:1], *other[-1:]])) or "no inputs")


def _tried(
    model: nn.Module, given: Mapping[str, Any], check: Callable[..., str] | None
) -> str | Exception:
    """Return what is wrong with these inputs, or ""."""
    try:
        found = compute(model, given)
        if not all(bool(t.isfinite().all()) for t in found):
            return "values that are not finite"
        if not any(t.numel() for t in found):  # nothing to compare, and the mean of nothing is NaN
            return "no values"
        return check(model, given) if check else ""
    except Exception as error:
        return error


def _short(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:160]}"


def compute(model: nn.Module, given: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the floating-point outputs of a forward without gradients."""
    with torch.no_grad():
        torch.manual_seed(SEED)
        return [t.clone() for t in inputs.floats(model(**_copied(given)))]


def _copied(given: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()}


def aligned(model: nn.Module) -> nn.Module:
    """Move a model's values from mapped files into memory that torch has allocated.

    safetensors maps files, in which a tensor begins at any multiple of its element size, and some
    kernels round otherwise there. With other names in the file's header, the same values would give
    other bits; lohan has torch's alignment everywhere.
    """
    with torch.no_grad():
        for param in model.parameters():
            param.data = param.data.clone()
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.clone()
    return model.eval()


def disturb(model: nn.Module) -> None:
    """Change every value, so that none is what an initialisation would give it."""
    rng = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point():
                param.add_(torch.randn(param.shape, generator=rng).to(param.dtype) * 0.01)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                module.running_mean.add_(0.01)
                module.running_var.add_(0.02)


def differences(a: list[torch.Tensor], b: list[torch.Tensor]) -> int:
    """Return the number of tensors that do not have the same bits."""
    if len(a) != len(b):
        return max(len(a), len(b))
    return sum(not _same(x, y) for x, y in zip(a, b, strict=True))


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(x.nan_to_num(), y.nan_to_num())


def states_differ(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> str:
    """Return what differs between two state dicts, or ""."""
    if a.keys() != b.keys():
        one, other = sorted(a.keys() - b.keys())[:1], sorted(b.keys() - a.keys())[:1]
        return f"names {one} and {other}"
    for name, value in a.items():
        if isinstance(value, torch.Tensor) and not _same(value, b[name]):
            return name
    return ""


def _loss(model: nn.Module, given: Mapping[str, Any]) -> torch.Tensor:
    torch.manual_seed(SEED)
    found = [t for t in inputs.floats(model(**_copied(given))) if t.requires_grad]
    return sum((t.float().square().mean() for t in found), torch.zeros(()))


def train(model: Any, given: Mapping[str, Any]) -> list[float]:
    """Train a wrapped model for two steps; return the losses."""
    made = []
    for _ in range(2):
        loss = _loss(model, given)
        loss.backward()
        model.optimizer.step()
        made.append(loss.item())
    return made


def _freeze_most(model: nn.Module) -> None:
    """Freeze all parameters but the smallest. Some of torch's kernels depend on the flag."""
    params = [*model.parameters()]
    least = min((p for p in params if p.is_floating_point()), key=lambda p: p.numel())
    for param in params:
        param.requires_grad_(param is least)


class Case:
    """One class.

    Args:
        make: builds a model with values from one of tiny.WAYS.
        empty: builds a model from a configuration, inside lohan.empty().
        load: from_pretrained of the class.
        folder: an empty folder on a disk.
        is_given: make() knows the way "given", a configuration by hand.
    """

    def __init__(
        self,
        make: Callable[[str], nn.Module],
        empty: Callable[[pathlib.Path], nn.Module],
        load: Callable[[pathlib.Path], nn.Module],
        folder: pathlib.Path,
        is_given: bool = False,
    ) -> None:
        self.ways = ("given",) if is_given else (*tiny.WAYS, *tiny.MORE_WAYS)
        self.make, self.empty, self.load, self.folder = make, empty, load, folder
        self.files = folder / "files"
        self.said: dict[str, str] = {}
        self.stores = 0

    def store(self) -> pathlib.Path:
        """Return the place of the next store, after the previous one was removed."""
        shutil.rmtree(self.folder / f"store-{self.stores}", ignore_errors=True)
        self.stores += 1
        return self.folder / f"store-{self.stores}"

    def run(self) -> dict[str, Any]:
        """Return what was found: "read", "frozen", "train", "write": "same" or what differs."""
        try:
            way = build(self.make, self._load_what_is_saved, self.ways)
        except NotBuiltError as error:
            return {"built": str(error)}
        made: dict[str, Any] = {"built": way, **self.said}
        for name in ("read", "frozen", "reference", "train_and_write"):
            try:
                made |= getattr(self, name)()
            except Exception as error:
                made[name] = _short(error)
                if not isinstance(error, lohan.errors.LohanError):
                    made["trace"] = traceback.format_exc()[-1500:]
        return made

    def _load_what_is_saved(self, model: nn.Module, given: Mapping[str, Any]) -> str:
        """Save a model and load it with the library; return what is wrong, or ""."""
        disturb(model)
        shutil.rmtree(self.files, ignore_errors=True)
        try:
            model.save_pretrained(self.files)
            self.right = self.load(self.files)
        except Exception as error:
            return f"the library cannot load what it saved: {_short(error)}"
        self.given = given
        self.expected = compute(self.right, given)
        if differences(self.expected, compute(self.load(self.files), given)):
            return "the library gives other values each time it loads"
        left = states_differ(model.state_dict(), self.right.state_dict())
        self.said = {"library": f"loads other values than it saved: {left}"} if left else {}
        return ""

    def wrapped(self, model: nn.Module, **settings: Any) -> Any:
        """Return a wrapped model."""
        return lohan.wrap(model, store=self.store(), **{**HYPER, **settings})

    def read(self) -> dict[str, str]:
        """Compare an empty model, filled from the files, with the loaded one."""
        model = self.wrapped(self.empty(self.files).eval(), weights=self.files)
        try:
            count = differences(compute(model, self.given), self.expected)
            left = states_differ(self.right.state_dict(), model.state_dict())
        finally:
            model.lohan.close()
        return {"read": f"{count} outputs" if count else left or "same"}

    def frozen(self) -> dict[str, str]:
        """Compare a model whose parameters, except one, are read in place."""
        plain, model = self.load(self.files), self.empty(self.files).eval()
        for each in (plain, model):
            _freeze_most(each)
        expected = compute(plain, self.given)
        model = self.wrapped(model, weights=self.files)
        try:
            count = differences(compute(model, self.given), expected)
            apart = [
                p
                for p in inside(model).layout.params
                if not inside(model).layout.units[p.unit].runs
            ]
            nbytes = sum(p.count * p.tensor.element_size() for p in apart)
            whole = sum(p.count * p.tensor.element_size() for p in inside(model).layout.params)
        finally:
            model.lohan.close()
        return {
            "frozen": f"{count} outputs" if count else "same",
            "copied": f"{nbytes / whole:.3f}",
        }

    def reference(self) -> dict[str, str]:
        """Compare lohan.reference() with the loaded model."""
        expected = compute(self.load(self.files).requires_grad_(False), self.given)
        twin: Any = lohan.reference(self.right, weights=self.files)
        try:
            count = differences(compute(twin, self.given), expected)
        finally:
            twin.lohan.close()
        return {"reference": f"{count} outputs" if count else "same"}

    def _trains_only_in_train_mode(self) -> bool:
        """Return whether the library's own model cannot be trained for two steps after eval()."""
        plain = self.load(self.files)
        try:
            for _ in range(2):
                _loss(plain, self.given).backward()
        except Exception:
            return True
        return False

    def train_and_write(self) -> dict[str, str]:
        """Train from files and from memory, save, export and load again."""
        loaded = self.load(self.files)
        given = self.given
        if self._trains_only_in_train_mode():
            loaded.train()
            given = {
                name: torch.cat([value, value]) if isinstance(value, torch.Tensor) else value
                for name, value in given.items()
            }
        flags = [p.requires_grad for p in loaded.parameters()]
        memory = self.wrapped(loaded)
        try:
            losses = train(memory, given)
            state = copy.deepcopy(dict(memory.state_dict()))
        finally:
            memory.lohan.close()
        shutil.rmtree(self.folder / f"store-{self.stores}")
        empty = self.empty(self.files).train(loaded.training)
        for param, flag in zip(empty.parameters(), flags, strict=True):
            param.requires_grad_(flag)
        model = self.wrapped(empty, weights=self.files)
        place = self.folder / f"store-{self.stores}"
        made = {}
        try:
            found = train(model, given)
            left = states_differ(state, dict(model.state_dict()))
            is_same = [*map(math.isnan, losses)] == [*map(math.isnan, found)] or losses == found
            made["train"] = left or ("same" if is_same and losses == found else "losses")
            model.save_pretrained(self.folder / "saved")
        finally:
            model.lohan.close()
        lohan.export(place, self.folder / "exported")
        for name in ("saved", "exported"):
            other = self.load(self.folder / name).state_dict()
            made[name] = states_differ(state, other) or "same"
        return made
