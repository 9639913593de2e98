"""The session of a model that is trained with method="mezo"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lohan.mezo._zo_method import MeZO
from lohan.mezo._zo_turns import Turns
from lohan.session._session import Session

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lohan.mezo._zo_setup import Zeroth
    from lohan.mezo._zo_turns import T


class ZerothSession(Session):
    """A wrapped model's connection to its engine, with what only method="mezo" has."""

    _method: MeZO

    def __init__(self, *args: Any, zeroth: Zeroth, **settings: Any) -> None:
        turns = Turns()
        settings |= {"runs": turns, "method": MeZO(zeroth, turns)}
        super().__init__(*args, **settings)

    @property
    def written_bytes(self) -> int:
        """The bytes of parameters that this session has written."""
        return self._method.written_bytes

    @property
    def read_bytes(self) -> int:
        """The bytes of parameters that were loaded into the computing device's memory."""
        return self._method.read_bytes

    def write_back(self) -> None:
        """Write every trained parameter and commit: the next session starts from these values.

        Does nothing if the parameters are never written (`write_every` is "never").
        """
        self._method.write_back()

    def together(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Run the model several times without gradients, reading each block once for all runs.

        The runs take turns at each block, each on its own thread, so the activations of all runs
        are in memory at once. The functions run one after the other in training mode and, unless
        runs="together" was set, if the model fits in memory or its forwards change state.

        Args:
            functions: each calls the model, for example on its own micro-batch.

        Returns:
            The result of each function.

        Raises:
            StepError: together() was called inside a forward, a backward or a step.
        """
        return self._method.together(functions)

    def step_of(self, model: nn.Module) -> Callable[[Callable[[], Any]], torch.Tensor]:
        """Return the function that becomes `model.zo_step`."""
        return self._method.step_of(model)
