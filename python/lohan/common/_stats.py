"""The times and bytes of a training step, and the resource that limited it."""

from __future__ import annotations

import dataclasses
from typing import Any

from lohan.common import _shown

READS = ("param_read", "state_read", "gradient_read", "saved_read")
WRITES = ("param_write", "state_write", "gradient_write", "commit_write", "saved_write")
COPIES = ("copy_in", "copy_out", "saved_in", "saved_out", "gathered")
LINKS = READS + WRITES + COPIES


def _line(name: str, value: Any) -> str:
    """Return a field of a StepStats or a Traffic with its unit, which ends the field's name."""
    if name.endswith("_ns"):
        return f"{name.removesuffix('_ns')}: {_shown.of_ns(value)}"
    if name.endswith(("_bytes", "_bytes_max")):
        return f"{name}: {_shown.of_bytes(value)}"
    return f"{name}: {value:,}"


@dataclasses.dataclass(frozen=True, repr=False)
class StepStats:
    """The figures of one step, from its first forward to the end of its commit. Times are in ns.

    Attributes:
        step: the number of the step, from 1.
        wall_ns: the time from the beginning of the forward to `optimizer.step()`.
        written_ns: the time from `optimizer.step()` until the writes and the commit were done,
            which happens during the next forward.
        bytes: the bytes moved over each link.
        planned_bytes: the bytes that were planned for each link before the step.
        replans: how often the order of uses differed from the predicted one.
        param_wait_ns: how long computation waited for parameters: on a GPU, how long its stream had
            nothing to execute because of this; elsewhere, how long the training thread waited.
        gradient_wait_ns: how long it waited because too many gradients were in flight, or for the
            end of the previous step.
        ssd_busy_ns: how long at least one I/O request was in flight.
        copy_in_ns, copy_out_ns: the time spent on copies to and from an accelerator; on a GPU, as
            measured there, without waits for what is copied.
        update_busy_ns: the time that workers spent on the optimizer, summed over `threads`.
        deferred_units: the number of units whose gradients waited for `optimizer.step()`; with
            schedule "auto", lohan chooses this number.
        bound_by: "compute", "ssd", "optimizer" or "copies": the busiest resource.
        clip_repeats: with IO(clip="repeat"), how many steps of the session so far were repeated
            because of max_grad_norm.
        clip_waits: how many steps waited for their norm, because the step before was clipped or
            because waiting was measured to be faster.
    """

    step: int
    wall_ns: int
    written_ns: int
    bytes: dict[str, int]
    planned_bytes: dict[str, int]
    replans: int
    param_wait_ns: int
    gradient_wait_ns: int
    ssd_busy_ns: int
    update_busy_ns: int
    commit_ns: int
    gradient_bytes_max: int
    updated_params: int
    deferred_units: int
    copy_in_ns: int
    copy_out_ns: int
    threads: int
    clip_repeats: int = 0
    clip_waits: int = 0

    @classmethod
    def make(cls, raw: dict[str, Any], threads: int) -> StepStats:
        """Create the stats from the engine's numbers."""
        return cls(
            step=raw["step"],
            wall_ns=raw["close_ns"] - raw["begin_ns"],
            written_ns=raw["end_ns"] - raw["close_ns"],
            bytes={k: raw[f"{k}_bytes"] for k in LINKS},
            planned_bytes={k: raw[f"planned_{k}_bytes"] for k in LINKS},
            replans=raw["replans"],
            param_wait_ns=raw["param_wait_ns"],
            gradient_wait_ns=raw["gradient_wait_ns"],
            ssd_busy_ns=raw["ssd_busy_ns"],
            update_busy_ns=raw["update_busy_ns"],
            commit_ns=raw["commit_ns"],
            gradient_bytes_max=raw["gradient_bytes_max"],
            updated_params=raw["updated_params"],
            deferred_units=raw["deferred_units"],
            copy_in_ns=raw["copy_in_ns"],
            copy_out_ns=raw["copy_out_ns"],
            threads=threads,
        )

    @classmethod
    def none(cls, threads: int) -> StepStats:
        """Return the stats of a session whose first step has not ended: every number is 0."""
        numbers = {f.name: 0 for f in dataclasses.fields(cls) if f.type == "int"}
        links = dict.fromkeys(LINKS, 0)
        return cls(**{**numbers, "threads": threads}, bytes=links, planned_bytes=dict(links))

    @property
    def read_bytes(self) -> int:
        """The bytes read from SSD."""
        return sum(self.bytes[k] for k in READS)

    @property
    def written_bytes(self) -> int:
        """The bytes written to SSD, including the commit."""
        return sum(self.bytes[k] for k in WRITES)

    def tbw(self, steps: int) -> float:
        """Return the terabytes that `steps` such steps write, to compare with a drive's rating."""
        return steps * self.written_bytes / 1e12

    @property
    def planned_read_bytes(self) -> int:
        """The bytes that the plan reads."""
        return sum(self.planned_bytes[k] for k in READS)

    @property
    def planned_written_bytes(self) -> int:
        """The bytes that the plan writes, including the commit."""
        return sum(self.planned_bytes[k] for k in WRITES)

    @property
    def waits(self) -> dict[str, int]:
        """How long computation waited, in ns, by what it waited for."""
        return {"parameters": self.param_wait_ns, "gradients": self.gradient_wait_ns}

    @property
    def _shares(self) -> dict[str, float]:
        """As busy; above 1 if a resource still worked for the step after its end."""
        wall = max(self.wall_ns, 1)
        shares = {
            "compute": max(0.0, 1.0 - sum(self.waits.values()) / wall),
            # The step's writes that end during the next forward count here, in place of the
            # previous step's writes, which ended during this step.
            "ssd": self.ssd_busy_ns / wall,
            "optimizer": self.update_busy_ns / max(self.threads, 1) / wall,
        }
        copies = max(self.copy_in_ns, self.copy_out_ns)
        return {**shares, "copies": copies / wall} if copies else shares

    @property
    def busy(self) -> dict[str, float]:
        """The share of the step during which each resource was busy."""
        return {name: min(1.0, share) for name, share in self._shares.items()}

    @property
    def bound_by(self) -> str:
        """The resource that was busy for the largest share of the step."""
        shares = self._shares
        return max(shares, key=lambda name: shares[name])

    def __repr__(self) -> str:
        """Return every number, one per line, with units; str() is one line."""
        lines = [f"{type(self).__name__} of step {self.step}, bound by {self.bound_by}"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "bytes":
                moved = ((k, value[k], self.planned_bytes[k]) for k in LINKS)
                lines += [
                    f"bytes[{k!r}]: {_shown.of_bytes(n)} (planned: {_shown.of_bytes(plan)})"
                    for k, n, plan in moved
                    if n or plan
                ]
            elif isinstance(value, Traffic):
                lines += [_line(f"traffic.{k}", n) for k, n in vars(value).items()]
            elif field.name not in ("step", "planned_bytes"):
                lines.append(_line(field.name, value))
        return "\n  ".join(lines)

    def __str__(self) -> str:
        """Return one readable line; repr() has every number."""
        if self.step == 0:
            return "no step of this session has ended yet: stats() reports the last complete step"
        waits = self.waits.items()
        waited = [f"{ns / 1e6:.0f} ms for {name}" for name, ns in waits if ns >= 500_000]
        busy = ", ".join(f"{name} {share:.0%}" for name, share in self.busy.items())
        is_as_planned = self.bytes == self.planned_bytes
        return (
            f"step {self.step}: {self.wall_ns / 1e6:.0f} ms, bound by {self.bound_by} ({busy} busy)"
            f"; SSD {self.read_bytes / 1e6:.1f} MB read, {self.written_bytes / 1e6:.1f} MB written"
            f" ({'as' if is_as_planned else 'not as'} planned); waited"
            f" {', '.join(waited) or 'for nothing'}"
        )


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What the exchange of gradients took. Times are in ns.

    Attributes:
        sent_bytes: the bytes sent to other processes, all of them together.
        received_bytes: the bytes received from other processes.
        send_busy_ns: how long at least one message was being sent. A message is sent as soon as its
            receiver has asked for it, which receivers do in advance.
        peer_wait_ns: how long the training thread waited for other processes: for their gradients,
            for the network, and for agreement in `optimizer.step()`.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    send_busy_ns: int = 0
    peer_wait_ns: int = 0

    def since(self, earlier: Traffic) -> Traffic:
        """Return what was added after an earlier count."""
        rows = zip(dataclasses.astuple(self), dataclasses.astuple(earlier), strict=True)
        return Traffic(*(now - before for now, before in rows))


@dataclasses.dataclass(frozen=True, repr=False)
class ReplicaStats(StepStats):
    """The figures of one step of several processes, as this process has seen it.

    Attributes:
        traffic: what the exchange of gradients took.
        bound_by: as in StepStats, or "network".
    """

    traffic: Traffic = Traffic()

    @property
    def waits(self) -> dict[str, int]:
        """How long computation waited, in ns, by what it waited for."""
        return {**super().waits, "other processes": self.traffic.peer_wait_ns}

    @property
    def _shares(self) -> dict[str, float]:
        """As busy; above 1 if a resource still worked for the step after its end."""
        share = self.traffic.send_busy_ns / max(self.wall_ns, 1)
        return {**super()._shares, "network": share}

    def __str__(self) -> str:
        """Return one readable line; repr() has every number."""
        if self.step == 0:
            return super().__str__()
        sent, received = self.traffic.sent_bytes / 1e6, self.traffic.received_bytes / 1e6
        return f"{super().__str__()}; network {sent:.1f} MB sent, {received:.1f} MB received"
