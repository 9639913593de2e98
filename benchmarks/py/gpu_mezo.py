"""gpu.sh mezo: zeroth-order steps on the device, compared with two forwards of a resident model."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from gpu_llama import MIDDLE, TINY, Filler, batches, build, empty
from gpu_part import Part, Skip, spread, store_folder, timed

ROUNDS = 5
STEPS_CHECKED = 2


class Mezo:
    """The cases of this part."""

    def __init__(self, part: Part) -> None:
        import torch

        self.part, self.place = part, part.place
        self.shape = self.place.pick(MIDDLE, TINY)
        self.dtype = torch.float32  # with this dtype parameters have no separate stored form
        self.tokens = batches(self.shape, self.place, 1)[0]
        self.rounds = self.place.pick(ROUNDS, 2)

    def wrapped(self, folder: Any, **settings: Any) -> Any:
        """Return the model wrapped by lohan."""
        import lohan
        from lohan.errors import UnsupportedError

        try:
            return lohan.wrap(
                empty(self.shape, self.dtype),
                store=folder / "store",
                init=Filler(),
                method="mezo",
                device=self.place.lohan,
                seed=7,
                lr=1e-6,
                eps=1e-3,
                allow_tmpfs=True,
                **settings,
            )
        except UnsupportedError as error:
            raise Skip(str(error)) from error

    def plain(self) -> Mapping[str, Any]:
        """Time two forwards without lohan, the minimum for a zeroth-order step."""
        import torch

        model = build(self.shape, self.dtype).to(self.place.device)

        def twice() -> None:
            with torch.inference_mode():
                model(self.tokens)
                model(self.tokens)

        twice()
        return spread("two_forwards", timed(self.place, twice, self.rounds))

    def steps(self, **settings: Any) -> Mapping[str, Any]:
        """Time steps with lohan."""
        with store_folder() as folder:
            model = self.wrapped(folder, **settings)
            try:
                losses: list[float] = []

                def step() -> None:
                    losses.append(float(model.zo_step(lambda: model(self.tokens))))

                step()
                step()
                self.place.reset_peak()
                seconds = timed(self.place, step, self.rounds)
                nbytes = 4 * self.shape.param_count
                return {
                    **spread("step", seconds),
                    "losses": losses[:STEPS_CHECKED],
                    # Each parameter is moved three times per step: to one side, to the other side,
                    # and back with the update.
                    "parameter_bytes": nbytes,
                    "moved_gb_per_s_at_least": 3 * nbytes / statistics.median(seconds) / 1e9,
                    **self.place.peak_bytes(),
                }
            finally:
                model.lohan.close()


def run(part: Part) -> None:
    """Run all cases."""
    mezo = Mezo(part)
    some = mezo.shape.param_count * 4 // 3
    part.run(
        {
            "plain": mezo.plain,
            "all_blocks": lambda: mezo.steps(device_param_bytes=8 * mezo.shape.param_count),
            "some_blocks": lambda: mezo.steps(device_param_bytes=some),
            "some_blocks_written": lambda: mezo.steps(device_param_bytes=some, write_every=2),
        }
    )
