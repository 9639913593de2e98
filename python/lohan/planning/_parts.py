"""Machines of parts: a GPU by its name, main memory and drives by their sizes.

GPUs have the figures of their datasheets (machines/gpus.toml): dense FLOP/s in 16 bits with sums
in fp32, memory, and the generation and width of PCIe. Several GPUs of a PC divide the lanes of one
slot of 16, as processors for consumers have them.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from importlib import resources

from lohan.common._units import quantity
from lohan.errors import MachineError
from lohan.planning._machines import SSD_COUNT_MAX, Machine

_PCIE = {"4x16": 31.5e9, "4x8": 15.8e9, "5x16": 63e9, "5x8": 31.5e9}


def _gpus() -> dict[str, tuple[float, str, str]]:
    text = (resources.files("lohan") / "machines" / "gpus.toml").read_text(encoding="utf-8")
    return {
        name: (flops, memory, bus) for name, (flops, memory, bus) in tomllib.loads(text).items()
    }


# TFLOP/s, memory, and PCIe of each GPU, by name.
GPUS = _gpus()
# What large products and copies reach of the datasheet, as the presets assume: an H200 0.7.
_FLOP_SHARE, _FLOP_SHARE_SERVER, _LINK_SHARE = 0.94, 0.7, 0.8
_SERVER = 300  # TFLOP/s
# What the system, torch and the user's program take of main memory: 4 GB and a sixteenth.
_SYSTEM_BYTES, _SYSTEM_PART = 4_000_000_000, 16
# AdamW is bound by two channels of DDR5.
_ADAM_PARAMS_PER_S = 1_200_000_000
# A consumer's drive sustains a fifth of its reads once its cache is full.
_WRITE_PART = 5
# What is assumed of a drive of which only the capacity is given: PCIe 4.0 x4, and what vendors rate
# consumers' drives for, in their capacity.
_READ_BYTES_PER_S = 7_000_000_000
_LIFE_WRITES = 600
GPU_COUNT_MAX = 8


def gpus_of(text: str) -> tuple[str, int]:
    """Parse GPUs as people write them: "rtx-4090", "RTX 4090", "4070ti laptop", "2x-rtx-3090".

    Returns:
        A key of GPUS, and the number of GPUs.

    Raises:
        MachineError: no such GPU is known, or it has another size of memory; the message has the
            closest names, or what to pass.
    """
    count, name = 1, re.sub(r"[\s_-]+", "-", text.strip().lower())
    if several := re.fullmatch(r"(\d+)-?x-?(.+)", name):
        count, name = int(several[1]), several[2]
    name = re.sub(r"^(nvidia-|geforce-)+", "", name)
    name = re.sub(r"-(sxm\d*|pcie|nvl|hbm\d\w*)(?=-|$)", "", name)  # as nvidia-smi writes it
    if re.match(r"((amd|radeon|rx|instinct|mi\d|intel|arc|apple)(-|\d|$)|m\d(-|$))", name):
        raise MachineError(
            f"--gpu {text}: lohan's kernels need CUDA, so plans are for NVIDIA GPUs, as"
            " rtx-4090; on a machine without one lohan.wrap() trains on its CPU: --machine here"
            " plans that"
        )
    sized = re.fullmatch(r"(.+?)-?(\d+)-?gi?b", name)  # its memory, as shops write it
    name = sized[1] if sized else name
    name = re.sub(r"^(rtx)?-?(a?\d{4})(?!\d)", r"rtx-\2", name)
    name = re.sub(r"(?<=\d)(ti|super)", r"-\1", name).replace("tisuper", "ti-super")
    name = re.sub(r"-?(laptop|mobile|notebook|max-q)(-gpu)?$", "-laptop", name)
    if name not in GPUS or not 1 <= count <= GPU_COUNT_MAX:
        close = difflib.get_close_matches(name, GPUS, 4, 0.5)
        known = f"did you mean {', '.join(close)}?" if close else f"one of {', '.join(GPUS)}."
        raise MachineError(
            f"--gpu {text}: pass the name of a GPU, as rtx-4090, or of up to {GPU_COUNT_MAX}, as"
            f" 2x-rtx-3090; {known} For another GPU write its figures to a file for --machine"
        )
    if sized and GPUS[name][1] not in (f"{sized[2]}GiB", f"{sized[2]}GB"):
        raise MachineError(
            f"--gpu {text}: {name} has {GPUS[name][1]} in plans; for one with {sized[2]}GiB pass"
            f" --gpu {'' if count == 1 else f'{count}x-'}{name} --set gpu_bytes={sized[2]}GiB"
        )
    return name, count


def _drives(text: str) -> dict[str, int]:
    """Parse drives such as "2TB,7GB/s,1200TBW" or "2x2TB,7GB/s,5GB/s,1.2PBW".

    The first rate is that of reads, the second that of writes. A drive with a capacity alone gets
    the rates and the endurance of a common one.
    """
    count, _, rest = text.rpartition("x") if re.match(r"\d+x", text) else ("1", "", text)
    made = {"ssd_count": int(count)}
    rates = []
    for part in (part.strip() for part in rest.split(",")):
        if part.endswith("BW"):
            made["ssd_endurance_bytes"] = quantity("--ssd: ssd_endurance_bytes", part[:-1])
        elif part.endswith("/s"):
            rates.append(quantity("--ssd: ssd_bytes_per_s", part))
        else:
            made["ssd_bytes"] = quantity("--ssd: ssd_bytes", part)
    if not rates and "ssd_bytes" in made:
        rates = [_READ_BYTES_PER_S]
        made.setdefault("ssd_endurance_bytes", _LIFE_WRITES * made["ssd_bytes"])
    if not 1 <= made["ssd_count"] <= SSD_COUNT_MAX or not 1 <= len(rates) <= 2 or 0 in rates:
        raise MachineError(
            f"--ssd {text}: pass 1 to {SSD_COUNT_MAX} drives with their capacity, the rate of"
            " reads and, if known, of writes, and the bytes that they endure, for example"
            ' "2TB,7GB/s,1.4GB/s,1200TBW", or "2x2TB,..." for two'
        )
    written = rates[1] if len(rates) == 2 else rates[0] // _WRITE_PART
    return {**made, "ssd_read_bytes_per_s": rates[0], "ssd_write_bytes_per_s": written}


def machine(gpu: str, ram: str, ssd: str, count: int = 1) -> Machine:
    """Return a machine of parts.

    Args:
        gpu: a key of GPUS.
        ram: the installed main memory, such as "64GiB".
        ssd: the drives, such as "2TB,7GB/s,1200TBW".
        count: the number of GPUs.

    Raises:
        MachineError: a part is unknown, or a figure is invalid.
    """
    tflops, memory, bus = GPUS[gpu]
    installed = quantity("--ram: host_bytes", ram)
    host = installed - _SYSTEM_BYTES - installed // _SYSTEM_PART
    if host <= 0:
        raise MachineError(f"--ram {ram}: the system takes about 4 GB of it; pass more")
    share = _FLOP_SHARE_SERVER if tflops > _SERVER else _FLOP_SHARE
    link = round(_PCIE[bus] * _LINK_SHARE)
    if count > 1 and share == _FLOP_SHARE:
        link = min(link, round(_PCIE[f"{bus[0]}x16"] * _LINK_SHARE) // count)
    gpus = gpu if count == 1 else f"{count} x {gpu}"
    return Machine(
        name=f"{gpus}, {ram} of RAM, {ssd}",
        gpu_flop_per_s=round(tflops * share * 1e12),
        gpu_bytes=quantity("gpu_bytes", memory),
        link_in_bytes_per_s=link,
        link_out_bytes_per_s=link,
        host_bytes=host,
        gpu_count=count,
        adam_params_per_s=_ADAM_PARAMS_PER_S,
        **_drives(ssd),
    )


def alone(made: Machine) -> Machine:
    """Return a machine of several GPUs with one of them, which has all lanes of its slot."""
    gpus, _, rest = made.name.partition(",")
    gpu = gpus.rpartition(" ")[2]
    link = round(_PCIE[GPUS[gpu][2]] * _LINK_SHARE)
    return dataclasses.replace(
        made,
        name=f"{gpu},{rest}",
        gpu_count=1,
        link_in_bytes_per_s=link,
        link_out_bytes_per_s=link,
    )
