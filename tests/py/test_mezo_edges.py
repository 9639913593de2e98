"""Zeroth-order training of models that use their parameters in unusual ways has MeZO's bits."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import lohan
import pytest
import torch
import torch.nn.functional as F
from lohan.common._inside import inside
from lohan.errors import HyperParameterError, LentError, StepError, StoreMismatchError
from lohan.journal._journal import BYTES, NAME
from lohan.mezo._zo_turns import Turns
from mezo_helper import EPS, LR, SEED, VOCAB, Plain, Settings, batches, differing
from torch import nn
from torch.overrides import TorchFunctionMode

WIDTH = 48
STEPS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) + x


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.side(h)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.hidden(ids)).flatten(0, 1), ids.flatten())


class WeightBetweenBlocks(Tower):
    """Uses its weight without its module, after one block and before the next."""

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        h = F.embedding(ids, self.embed.weight)
        for block in self.blocks:
            h = block(F.linear(h, self.side.weight, self.side.bias))
        return h


class TiedByFunction(Tower):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.head.bias.sum() + self.hidden(ids)
        return F.cross_entropy(F.linear(h, self.embed.weight).flatten(0, 1), ids.flatten())


class ChosenBlocks(Tower):
    """Has blocks whose selection and number depend on the values."""

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for scale in (1e4, 1e5, 1e3):
            h = self.blocks[int(h.sum().abs() * scale) % 4](h)
        for block in self.blocks[: int(h.sum().abs() * 1e4) % 3]:
            h = block(h)
        return h


class Narrow(nn.Module):
    """Computes a product for which torch uses another kernel if the weight requires no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, WIDTH))
        self.seen: set[tuple[bool, bool]] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add((torch.is_grad_enabled(), self.weight.requires_grad))
        across = x.transpose(1, 2).contiguous().transpose(1, 2)
        return x + F.linear(across, self.weight).sum(-1, keepdim=True)


class Transposed(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Narrow() for _ in range(3))


class Encoder(nn.Module):
    """A module with its own frozen parameter, around blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return x


class Encoded(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.encoder = Encoder()

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return self.side(self.encoder(self.embed(ids)))


class Window(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(64, WIDTH))

    def forward(self, count: int) -> torch.Tensor:
        return self.table[:count]


class PassesViews(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.window = Window()

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        window = self.window(ids.shape[1])
        return super().hidden(ids) + window


def plain_loss(model: Any, ids: torch.Tensor) -> Any:
    return model(ids)


def penalized(model: Any, ids: torch.Tensor) -> Any:
    return model(ids) + 1e-2 * sum(param.square().sum() for param in model.parameters())


Loss = Callable[[Any, torch.Tensor], Any]


def run_of(make: Callable[[], nn.Module], loss: Loss, samples: int) -> tuple[list[float], Any]:
    plain = Plain(make(), Settings(samples=samples))
    losses = [
        float(torch.tensor(plain.step(lambda b=b: loss(plain.model, b)))) for b in batches(STEPS)
    ]
    return losses, plain.values()


def wrapped(model: nn.Module, store: pathlib.Path, **more: Any) -> Any:
    return lohan.wrap(model, store=store, method="mezo", lr=LR, eps=EPS, seed=SEED, **more)


def steps(model: Any, loss: Loss) -> list[float]:
    return [float(model.zo_step(lambda b=b: loss(model, b))) for b in batches(STEPS)]


CASES = [
    (WeightBetweenBlocks, plain_loss),
    (TiedByFunction, plain_loss),
    (ChosenBlocks, plain_loss),
    (Tower, penalized),
    (Encoded, plain_loss),
    (Transposed, plain_loss),
]


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize(("make", "loss"), CASES, ids=lambda x: x.__name__)
def test_parameters_used_outside_their_block_have_the_side_of_the_run_that_reads_them(
    make: type[nn.Module], loss: Loss, samples: int, store_dir: pathlib.Path
) -> None:
    losses, values = run_of(make, loss, samples)
    for runs in ("together", "apart"):
        model = wrapped(make(), store_dir / runs, runs=runs, num_samples=samples)
        assert steps(model, loss) == losses
        assert differing(model, values) == []
        model.lohan.close()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_has_the_bits_of_the_plain_model_and_nothing_is_saved_for_backward(
    context: Callable[[], Any], store_dir: pathlib.Path
) -> None:
    plain, model = Transposed(), wrapped(Transposed(), store_dir)
    (batch,) = batches(1)
    with context():
        assert torch.equal(model(batch), plain(batch))
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
    assert not model(batch).requires_grad
    assert not any(param.requires_grad for param in model.parameters())
    assert model.blocks[0].seen == {(False, True), (True, False)}
    model.requires_grad_(True)
    assert not model(batch).requires_grad
    assert not model.blocks[0].weight.requires_grad
    lohan.unwrap(model)
    assert all(param.requires_grad for param in model.parameters())


def test_turns_are_taken_at_the_blocks_inside_a_module_with_frozen_parameters(
    store_dir: pathlib.Path,
) -> None:
    made = Encoded()
    blocks = [made.embed, made.side, *made.encoder.blocks, made.head]
    model = wrapped(made, store_dir, runs="together", blocks=blocks)
    assert any(unit.always for unit in inside(model).layout.units)
    visits: list[bool] = []
    for module in model.modules():
        if isinstance(module, Block):
            module.register_forward_pre_hook(
                lambda *_: visits.append(inside(model).runs.is_other())
            )
    model.zo_step(lambda: model(batches(1)[0]))
    assert visits == [False, True] * 4
    model.lohan.close()


class Steeper(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return 1.5 * made if func is torch.tanh else made


def test_both_runs_have_the_function_modes_of_who_steps(store_dir: pathlib.Path) -> None:
    with Steeper():
        losses, values = run_of(Tower, plain_loss, 1)
    model = wrapped(Tower(), store_dir, runs="together")
    with Steeper():
        assert steps(model, plain_loss) == losses
    assert differing(model, values) == []
    model.lohan.close()


def test_a_view_that_is_in_the_way_is_refused_with_the_way_out(store_dir: pathlib.Path) -> None:
    data = batches(STEPS)
    losses, values = run_of(PassesViews, plain_loss, 1)
    model = wrapped(PassesViews(), store_dir / "a", runs="together")
    with pytest.raises(LentError, match=r'MeZO.runs="apart"'):
        model.zo_step(lambda: model(data[0]))
    assert model.lohan.step == 0
    model.lohan.close()
    model = wrapped(PassesViews(), store_dir / "b", runs="apart")
    assert steps(model, plain_loss) == losses
    assert differing(model, values) == []
    model.lohan.close()


class Interrupting(set[int]):
    """Raises a Ctrl-C when `left` units have just been advanced."""

    def __init__(self, lost: set[int], left: int) -> None:
        super().__init__(lost)
        self.left = left

    def discard(self, unit: int) -> None:
        super().discard(unit)
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
def test_a_ctrl_c_behind_a_lead_is_no_lead_that_is_made_twice(
    storage: str, store_dir: pathlib.Path
) -> None:
    model = wrapped(Tower(), store_dir / "a", storage=storage)
    losses = steps(model, plain_loss)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model.lohan.close()
    model = wrapped(Tower(), store_dir / "b", storage=storage)
    found = []
    for step, batch in enumerate(batches(STEPS)):
        for left in range(1, 4) if step else ():
            inside(model).method._lost = Interrupting(inside(model).method._lost, left)
            with pytest.raises(KeyboardInterrupt):
                model.zo_step(lambda batch=batch: plain_loss(model, batch))
        found.append(float(model.zo_step(lambda batch=batch: plain_loss(model, batch))))
    assert found == losses
    assert differing(model, values) == []
    model.lohan.close()


def test_a_slope_that_fp32_cannot_hold_is_no_step(store_dir: pathlib.Path) -> None:
    losses, values = run_of(Tower, plain_loss, 1)
    model = wrapped(Tower(), store_dir)
    for large in (1e38, 1.7e308):
        signs = iter((1.0, -1.0))
        with pytest.raises(StepError, match="slope"):
            model.zo_step(lambda signs=signs, large=large: next(signs) * large)
    assert steps(model, plain_loss) == losses
    assert differing(model, values) == []
    model.lohan.close()


def test_a_journal_that_is_older_than_the_parameters_is_refused(store_dir: pathlib.Path) -> None:
    model = wrapped(Tower(), store_dir, write_every=1)
    steps(model, plain_loss)
    model.lohan.close()
    journal = (store_dir / NAME).read_bytes()
    (store_dir / NAME).write_bytes(journal[:-BYTES])
    with pytest.raises(StoreMismatchError, match="ends at step 2"):
        lohan.wrap(Tower(), store=store_dir, method="mezo", resume=True)
    with pytest.raises(StoreMismatchError, match="ends at step 2"):
        lohan.export(store_dir, store_dir / "out")
    (store_dir / NAME).write_bytes(journal)
    again = lohan.wrap(Tower(), store=store_dir, method="mezo", resume=True)
    assert differing(again, run_of(Tower, plain_loss, 1)[1]) == []
    again.lohan.close()


def test_decay_that_begins_later_is_for_all_groups_or_none(store_dir: pathlib.Path) -> None:
    tower = Tower()
    head = [*tower.head.parameters()]
    rest = [p for p in tower.parameters() if not any(p is other for other in head)]
    model = wrapped(tower, store_dir, params=[{"params": rest}, {"params": head}])
    batch = batches(1)[0]
    model.zo_step(lambda: model(batch))
    model.optimizer.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(HyperParameterError, match="weight_decay"):
        model.zo_step(lambda: model(batch))
    model.optimizer.param_groups[1]["weight_decay"] = 0.1
    model.zo_step(lambda: model(batch))
    assert model.lohan.step == 2
    model.lohan.close()


def test_a_parameter_without_elements_is_skipped_in_its_group(store_dir: pathlib.Path) -> None:
    losses = []
    for is_given in (False, True):
        tower = Tower()
        tower.none = nn.Parameter(torch.empty(0, WIDTH))
        params = [*tower.parameters()]
        given = {"params": [{"params": params}]} if is_given else {}
        model = wrapped(tower, store_dir / str(is_given), **given)
        losses.append(steps(model, plain_loss))
        members = model.optimizer.param_groups[0]["params"]
        assert any(member is tower.none for member in members) is is_given
        model.lohan.close()
    assert losses[0] == losses[1]


# --- What a run leaves ----------------------------------------------------------------------------


class KeepsLosses(Tower):
    """A model whose blocks each store a loss on themselves; the end adds them up."""

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
            block.loss = h.square().mean()
        return h

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + sum(block.loss for block in self.blocks)


class DrawsNoise(Tower):
    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h + 0.01 * torch.randn_like(h))
        return h


@pytest.mark.parametrize(
    ("make", "said"), [(KeepsLosses, "blocks.0.loss"), (DrawsNoise, "random"), (Tower, None)]
)
def test_runs_take_turns_by_themselves_only_where_none_sees_what_the_other_left(
    make: Callable[[], Any],
    said: str | None,
    store_dir: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Turns, "_choose_runs", lambda self: True)
    plain = Plain(make(), Settings())
    torch.manual_seed(3)
    expected = [float(torch.tensor(plain.step(lambda b=b: plain.model(b)))) for b in batches(4)]
    model = lohan.wrap(make(), store=store_dir, method="mezo", lr=LR, eps=EPS, seed=SEED)
    torch.manual_seed(3)
    assert [float(model.zo_step(lambda b=b: model(b))) for b in batches(4)] == expected
    assert differing(model, plain.values()) == []
    assert inside(model).runs.is_together == (said is None)
    assert said is None or said in capsys.readouterr().err
    model.lohan.close()
