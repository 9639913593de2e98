"""A session of several processes, each of which trains a whole replica with AdamW.

[Note: Replicas with AdamW] Every process has all parameters and states, in main memory and in a
store of its own. In each backward the processes exchange their gradients (_exchange.py), so that
all of them have the same sums, and make the same update. Updates wait for `step()`, and begin only
after all processes have agreed on the step and on its hyper-parameters: a step that fails in one
process is forgotten by all.

[Note: Commits of replicas] A process gives its first gradient of step t + 1 only after its commit
of step t is durable: the engine waits for that anyway, before the first gradient of a step. So
when a process commits t + 1, all have committed t, and a store keeps the step before its newest
one. Whenever the processes are killed, there is a step that all stores can open.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lohan.errors import PeerStepError, StepError, UnsupportedError
from lohan.replicas._exchange import Exchange
from lohan.session._session import Session
from lohan.world._agree import agree

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lohan.world._world import World


_DISCARDED = b""  # what a process tells the others that it does in place of step()


class _RefuseDdp:
    """What DistributedDataParallel reads of a model first: the names of parameters to ignore."""

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)

    def __iter__(self) -> Iterator[str]:
        """Return no names if the model is not wrapped any more.

        Raises:
            UnsupportedError: the model's session exchanges gradients already.
        """
        session = self._session()
        if session is not None and not session.closed:
            raise UnsupportedError(
                "DistributedDataParallel cannot wrap a model of lohan, whose processes exchange"
                " gradients themselves: use the model as it is. With Accelerate, call"
                " accelerator.prepare_model(model, evaluation_mode=True); with a Trainer, pass"
                " lohan.TrainerCallback"
            )
        return iter(())


class ReplicaSession(Session):
    """A session that exchanges gradients with other processes."""

    _is_discarded = False  # whether the other processes know that the open step is forgotten

    def __init__(self, *args: Any, world: World, **settings: Any) -> None:
        """Make a session, and connect it to those of the other processes."""
        self.world = world
        super().__init__(*args, **settings)
        trained = [p for p in self.layout.params if self.layout.units[p.unit].trainable]
        try:
            # A state that one process saves is loaded by all: it names the stores of all.
            told = world.exchange(self.uuid.encode(), "the stores")
            self.replicas = tuple(uuid.decode() for uuid in told)
            self._exchange = Exchange(world, self._engine, trained)
        except BaseException:
            self._engine.close()
            raise

    def hook(self, model: nn.Module, planner: Callable[..., Any]) -> None:
        """Put the hooks on the model."""
        super().hook(model, planner)
        model.__dict__["_ddp_params_and_buffers_to_ignore"] = _RefuseDdp(self)

    @property
    def sent_bytes(self) -> int:
        """The bytes of gradients that this process has sent, to all others together."""
        return self._exchange.sent_bytes

    @property
    def backward_bytes(self) -> int:
        """The bytes of gradients that a backward sends, to all others together."""
        return self._exchange.backward_bytes

    def _gradient_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        engine, exchange = self._engine, self._exchange

        def hook(param: torch.Tensor) -> None:
            gradient = engine.gradient_pull(index, param)
            if gradient is not None:
                exchange.give(engine.status()["step"], index, gradient)

        return hook

    def _on_backward_end(self) -> None:
        if self._exchange.is_open:
            self._exchange.finish()
        super()._on_backward_end()

    def close_step(self, unscale: float = 1.0) -> None:
        """Close the open step in all processes, once they agree on it; see Session.close_step."""
        self.check_open()
        has_gradients = bool(self._engine.status()["has_gradients"])
        if has_gradients:
            self._agree(unscale)
        super().close_step(unscale)
        self._exchange.forget()
        if has_gradients:
            self._exchange.take_order()

    def _agree(self, unscale: float) -> None:
        """Check that all processes close the same step with the same hyper-parameters."""
        if self._backward == "running":
            raise StepError(
                "the backward of this step raised an exception: call"
                " model.optimizer.zero_grad() to discard the step, or begin the next forward"
            )
        what = f"step {self.step + 1}"
        self.world.say(f"in step() of {what}")
        facts = [
            (f"{name} of parameter group {number}", value)
            for number, hyper in enumerate(self._hypers())
            for name, value in zip(
                ("lr", "beta1", "beta2", "eps", "weight_decay"), hyper, strict=True
            )
        ]
        facts.append(("the factor of the gradients", unscale * self._scale.factor()))
        digest = hashlib.sha256(json.dumps(facts).encode()).digest()
        told = self.world.exchange(digest, what)
        if discarded := [rank for rank, value in enumerate(told) if value == _DISCARDED]:
            self._is_discarded = True
            raise PeerStepError(
                f"{', '.join(map(self.world.name, discarded))} discarded {what}. All processes must"
                " forget it, and the parameters are unchanged: continue with"
                " model.optimizer.zero_grad()"
            )
        if any(value != digest for value in told):
            way_out = ": give all processes the same schedule. No process keeps the step"
            agree(self.world, what, facts, way_out)
        self.world.say(f"after {what}")

    def _abort(self) -> None:
        """Forget the open step in all processes: those that close it meanwhile raise an error."""
        exchange = self._exchange
        if exchange.is_open:
            exchange.finish(failed=True)
        if exchange.has_begun and not self._is_discarded:
            self.world.exchange(_DISCARDED, f"step {self.step + 1}")
        super()._abort()
        exchange.forget()
        self._is_discarded = False

    def commit(self) -> None:
        """Commit in all processes: none continues before the commits of all are durable."""
        super().commit()
        self.world.exchange(b"", f"commit() at step {self.step}")

    def commit_together(self, *, is_ready: bool) -> bool:
        """Commit if all processes are ready, and say whether they were.

        Args:
            is_ready: whether what belongs to the commit is durable in this process.
        """
        told = self.world.exchange(b"+" if is_ready else b"-", f"a checkpoint of step {self.step}")
        if all(each == b"+" for each in told):
            self.commit()
            return True
        return False

    def close(self) -> None:
        """Commit the closed steps, stop the engine and release the store. Idempotent."""
        if not self._engine.is_forked():
            try:
                self._exchange.close()
                self.world.leave_after(self.step)
            except Exception:  # not a Ctrl-C: after one, a further call does all of this
                super().close()
                raise
        super().close()
