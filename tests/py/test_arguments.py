"""Arguments of `lohan.wrap` of a wrong type are refused by name, and nothing is made."""

from __future__ import annotations

import collections
import errno
import os
import pathlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import lohan
import pytest
import torch
from lohan import errors
from lohan.common import _arguments
from lohan.errors import LohanError, UnsupportedError
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor

NAN, INF = float("nan"), float("inf")
# The keyword, the value, and what the message contains besides the value.
WRONG: list[tuple[str, Any, str]] = [
    ("store", b"/tmp/store", "a path, or a list of paths"),
    ("store", "", "is not a valid file name"),
    ("store", "a\0b", "is not a valid file name"),
    ("store", "a\ud800", "is not a valid file name"),
    ("store", 3, "a path, or a list of paths"),
    ("store", {"/tmp/a"}, "a path, or a list of paths"),
    ("store", {"/tmp/a": 1}, "a path, or a list of paths"),
    ("store", [], "names no directory"),
    ("store", ["/tmp/a", 3], "an item of store= 3 must be a path"),
    ("store", ["/tmp/a", None], "an item of store= None must be a path"),
    ("store", ["/tmp/a", b"/tmp/b"], "an item of store= b'/tmp/b' must be a path"),
    ("weights", 3, "a path"),
    ("weights", b"/tmp", "a path"),
    ("weights", ["a"], "a path"),
    ("weights", "", "not a valid file name"),
    ("weights", "a\0b", "not a valid file name"),
    ("resume", "yes", "store= names the store to resume"),
    ("resume", -1, "the number of the step"),
    ("resume", 1.0, "the number of the step"),
    ("resume", "step x", "the number of the step"),
    ("resume", "step 9999999999999999999", "the number of the step"),
    ("resume", 0, r"may mean False or step 0: pass resume=False, or resume_step=0"),
    ("resume", 1, r"may mean True or step 1: pass resume=True, or resume_step=1"),
    ("resume_step", True, "the number of a step"),
    ("resume_step", -1, "the number of a step"),
    ("resume_step", "step 3", "the number of a step"),
    ("betas", 0.9, r"two numbers.*betas=\(0.9, 0.999\)"),
    ("betas", (0.9, 0.9, 0.9), "two numbers"),
    ("betas", "ab", "two numbers"),
    ("betas", (0.9, None), "two numbers"),
    ("betas", (1.0, 0.9), r"not in \[0, 1\)"),
    ("betas", (NAN, 0.9), r"not in \[0, 1\)"),
    ("lr", "1e-3", "text, not a number"),
    ("lr", -1.0, "below 0"),
    ("lr", NAN, "lr nan is not a number"),
    ("lr", INF, "finite"),
    ("lr", 1e39, "finite"),
    ("lr", True, "a number"),
    ("lr", 1j, "a number"),
    ("lr", [1e-3, 1e-3], "a number"),
    ("lr", torch.ones(2), "a number"),
    ("eps", "x", "text"),
    ("eps", -1, "below 0"),
    ("eps", [1], "a number"),
    ("weight_decay", "x", "text"),
    ("weight_decay", -1, "below 0"),
    ("weight_decay", NAN, "is not a number"),
    ("weight_decay", (1,), "a number"),
    ("max_grad_norm", "1", "a number above 0"),
    ("max_grad_norm", [1], "a number above 0"),
    ("max_grad_norm", True, "a number above 0"),
    ("max_grad_norm", 0, "a number above 0"),
    ("device", 0, "a torch.device"),
    ("device", b"cpu", "a torch.device"),
    ("device", "cpu:1", "'cuda:INDEX'"),
    ("device", torch.device("meta"), "'cuda:INDEX'"),
    ("device", torch.device("cpu:1"), "'cuda:INDEX'"),
    ("params", "all", r"model\.parameters\(\)"),
    ("params", 3, r"model\.parameters\(\)"),
    ("params", [1, 2], r"model\.parameters\(\)"),
    ("params", ["0.weight"], r"model\.parameters\(\)"),
    ("params", {"params": []}, r"model\.parameters\(\)"),
    ("params", [{}], "'params' is None"),
    ("params", [{"params": 3}], "'params' is int 3"),
    ("params", [{"params": "all"}], "'params' is str 'all'"),
    ("params", torch.ones(2), r"model\.parameters\(\)"),
    ("params", [torch.ones(2)], "not a parameter of the model"),
    ("config", {"host_bytes": "1GB"}, r"lohan\.wrap\(model, \*\*settings\)"),
    ("config", "x", r"lohan\.Config"),
    ("config", lohan.Config, r"lohan\.Config"),
    ("host_bytes", "lots", '"16GB"'),
    ("host_bytes", 1e9, "a whole number"),
    ("host_bytes", -1, "a whole number"),
    ("host_bytes", True, "a whole number"),
    ("host_bytes", [1], "a whole number"),
    ("host_bytes", 10**30, "a whole number"),
    ("threads", True, "a whole number"),
    ("commit_every", True, "a number of steps"),
    ("commit_every", [1], "a number of steps"),
    ("write_every", True, "a number of steps"),
    (
        "method",
        "MEZO",
        "one of adamw, adam, lion, sgd, adagrad, rmsprop, adam_mini, adafactor, muon, mezo",
    ),
    ("method", 7, "rmsprop, adam_mini, adafactor, muon, mezo"),
    ("method", ["sgd"], r"muon, mezo, or an object such as lohan\.SGD\(momentum=0\.9\)"),
    ("optimizer", "adamw", "torch.optim.AdamW"),
    ("optimizer", torch.optim.AdamW, "torch.optim.AdamW"),
    ("blocks", "layer", "modules of the model, not their names"),
    ("blocks", 3, "a list of modules"),
    ("blocks", nn.Linear(4, 4), r"blocks=list\(model\.layers\)"),
    ("blocks", ["0"], "not in the model"),
    ("blocks", [nn.Linear], "not in the model"),
    ("blocks", [nn.Linear(4, 4)], "not in the model"),
    ("init", 3, "a function of a module"),
    ("ablate", 3, "'overlap'"),
    ("ablate", "overlap", "a tuple"),
    ("ablate", ([],), "'overlap'"),
    ("verify", "no", "True or False"),
    ("allow_buffered", 2, "True or False"),
    ("loss_scaling", "x", "True or False"),
    ("activations", ["keep"], "'recompute'"),
    ("host_byte", 3, "did you mean host_bytes="),
    ("learning_rate", 3, "did you mean lr="),
    ("betta", 3, "did you mean betas="),
    ("zzz", 3, r"help\(lohan\.wrap\)"),
]
X = torch.ones(2, 4)


def _build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _check_nothing_was_made(model: nn.Module, folder: pathlib.Path) -> None:
    assert not list(folder.rglob("lohan.data"))
    assert torch.equal(model(X), _build()(X))
    assert "lohan" not in model.__dict__


@pytest.mark.parametrize(("name", "value", "said"), WRONG, ids=lambda value: repr(value)[:30])
def test_a_wrong_argument_is_refused_with_its_value_and_what_it_can_be(
    name: str, value: Any, said: str, store_dir: pathlib.Path
) -> None:
    model = _build()
    with pytest.raises(LohanError, match=said) as caught:
        lohan.wrap(model, **{"store": store_dir / "a", name: value})
    message = str(caught.value)
    assert name in message
    if isinstance(value, str | int | float | tuple) and value == value and "twice" not in said:
        shown = (repr(value), str(value), name)
        assert any(text in message for text in shown), message
    _check_nothing_was_made(model, store_dir)


RIGHT: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "torch.device": lambda m: {"device": torch.device("cpu")},
    "torch.device with index": lambda m: {"device": torch.device("cpu", 0)},
    "cpu:0": lambda m: {"device": "cpu:0"},
    "lr tensor": lambda m: {"lr": torch.tensor(1e-3)},
    "lr int": lambda m: {"lr": 1},
    "betas list": lambda m: {"betas": [0.9, 0.99]},
    "norm of inf": lambda m: {"max_grad_norm": INF},
    "generator": lambda m: {"params": m.parameters()},
    "names": lambda m: {"params": m.named_parameters()},
    "groups": lambda m: {"params": [{"params": m.parameters(), "lr": 1e-4}]},
    "one in a group": lambda m: {"params": [{"params": p} for p in m.parameters()]},
    "module list": lambda m: {"blocks": nn.ModuleList([m[0]])},
    "sequential": lambda m: {"blocks": m},
    "generator of blocks": lambda m: {"blocks": (block for block in m)},
    "deque": lambda m: {"blocks": collections.deque(m)},
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_torch_takes_is_taken(name: str, store_dir: pathlib.Path) -> None:
    model = _build()
    wrapped = lohan.wrap(model, store=store_dir, **RIGHT[name](model))
    wrapped(X).sum().backward()
    wrapped.optimizer.step()
    assert wrapped.lohan.step == 1
    wrapped.lohan.close()


def test_a_store_is_named_by_any_path(store_dir: pathlib.Path) -> None:
    class Where:
        def __fspath__(self) -> str:
            return str(store_dir / "a")

    for store in (Where(), store_dir / "b", str(store_dir / "c"), (store_dir / "d",)):
        lohan.wrap(_build(), store=store).lohan.close()
    assert len(list(store_dir.rglob("lohan.data"))) == 4

    class Bytes:
        def __fspath__(self) -> bytes:
            return b"/tmp/e"

    with pytest.raises(LohanError, match="a path"):
        lohan.wrap(_build(), store=Bytes())
    with pytest.raises(LohanError, match="3 must be a store's directories, a wrapped model"):
        lohan.export(3, store_dir / "out")
    with pytest.raises(LohanError, match="not a valid file name"):
        lohan.verify("a\0b")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (
            lambda m, d: torch.optim.AdamW(m.parameters()),
            r"lohan\.wrap\(model, optimizer=optimizer",
        ),
        (lambda m, d: d, r"lohan\.wrap\(model, store='"),
        (lambda m, d: lohan.Config(), "NAME=VALUE"),
    ],
    ids=["optimizer", "store", "config"],
)
def test_a_second_positional_argument_says_which_keyword_it_is(
    given: Any, meant: str, store_dir: pathlib.Path
) -> None:
    model = _build()
    with pytest.raises(LohanError, match=meant):
        lohan.wrap(model, given(model, store_dir / "a"))  # type: ignore[misc]
    _check_nothing_was_made(model, store_dir)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (lambda m: [*m.parameters(), m[0].weight], "'0.weight' twice"),
        (lambda m: [{"params": m.parameters()}, {"params": [m[0].bias]}], "'0.bias' twice"),
        (lambda m: [{"params": m.parameters(), "betas": 0.9}], "betas 0.9 must be two numbers"),
        (lambda m: [{"params": m.parameters(), "lr": [1]}], r"lr \[1\]"),
        (lambda m: [{"params": m.parameters(), "lr": "x"}], "lr 'x' is text"),
        (lambda m: [m[0].weight], "omits 3"),
    ],
)
def test_wrong_groups_are_refused_by_the_parameter_s_name(
    groups: Any, said: str, store_dir: pathlib.Path
) -> None:
    model = _build()
    with pytest.raises(LohanError, match=said):
        lohan.wrap(model, store=store_dir / "a", params=groups(model))
    _check_nothing_was_made(model, store_dir)


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group that consists of this process alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def _sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def _distributed(model: nn.Module) -> nn.Module:
    weight = distribute_tensor(model[0].weight.detach(), init_device_mesh("cpu", (1,)))
    model[0].weight = nn.Parameter(weight)
    return model


DIVIDED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "FullyShardedDataParallel": lambda m: FullyShardedDataParallel(
        m, device_id=torch.device("cpu")
    ),
    "fully_shard": _sharded,
    "DTensor": _distributed,
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("kind", DIVIDED)
def test_a_model_that_is_divided_or_replicated_already_is_refused_by_the_wrapper_s_name(
    kind: str, store_dir: pathlib.Path
) -> None:
    for outer in (lambda m: m, lambda m: nn.Sequential(m)):
        with pytest.raises(UnsupportedError, match=f"{kind}.*the model from before"):
            lohan.wrap(outer(DIVIDED[kind](_build())), store=store_dir / "a")
    assert not os.listdir(store_dir)


def test_the_step_to_resume_at_is_never_a_flag() -> None:
    for flag in (None, False, True):
        assert _arguments.resume_of(flag) == (bool(flag), None)
    for step in (2, 41):
        assert _arguments.resume_of(step) == (True, step)
    for step in (0, 1, 41):
        assert _arguments.resume_of(f"step {step}") == (True, step)


@pytest.mark.parametrize(
    ("step", "way_out"), [(1, "resume_step=1 goes"), (12, "resume_step=12 goes")]
)
def test_the_way_back_to_a_step_that_a_message_names_is_accepted(step: int, way_out: str) -> None:
    message = f"the step before it, {step}, is intact: resume={step} goes back to it permanently"
    assert way_out in str(errors.store_error(-errno.EILSEQ, message))
