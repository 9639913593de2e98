"""Machines of parts: a GPU by its name, main memory and drives by their sizes.

GPUs have the figures of their datasheets: dense FLOP/s in 16 bits with sums in fp32, memory, and
the generation and width of PCIe.
"""

from __future__ import annotations

import re

from lohan.common._units import quantity
from lohan.errors import MachineError
from lohan.planning._machines import SSD_COUNT_MAX, Machine

# TFLOP/s, memory, bytes/s of PCIe each way.
_PCIE = {"4x16": 31.5e9, "4x8": 15.8e9, "5x16": 63e9, "5x8": 31.5e9}
GPUS = {
    "rtx-3060": (25.5, "12GiB", "4x16"),
    "rtx-3090": (71.0, "24GiB", "4x16"),
    "rtx-4060-ti": (44.1, "16GiB", "4x8"),
    "rtx-4070-ti-super": (88.2, "16GiB", "4x16"),
    "rtx-4080": (97.5, "16GiB", "4x16"),
    "rtx-4090": (165.2, "24GiB", "4x16"),
    "rtx-5080": (112.6, "16GiB", "5x16"),
    "rtx-5090": (209.5, "32GiB", "5x16"),
    "a100": (312.0, "80GB", "4x16"),
    "h100": (989.0, "80GB", "5x16"),
    "h200": (989.0, "141GB", "5x16"),
}
# What large products and copies reach of the datasheet, as the presets assume: an H200 0.7.
_FLOP_SHARE, _FLOP_SHARE_SERVER, _LINK_SHARE = 0.94, 0.7, 0.8
_SERVER = 300  # TFLOP/s
# What the system, torch and the user's program take of main memory: 4 GB and a sixteenth.
_SYSTEM_BYTES, _SYSTEM_PART = 4_000_000_000, 16
# AdamW is bound by two channels of DDR5.
_ADAM_PARAMS_PER_S = 1_200_000_000
# A consumer's drive sustains a fifth of its reads once its cache is full.
_WRITE_PART = 5


def _drives(text: str) -> dict[str, int]:
    """Parse drives such as "2TB,7GB/s,1200TBW" or "2x2TB,7GB/s,5GB/s,1.2PBW".

    The first rate is that of reads, the second that of writes.
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
    if not 1 <= made["ssd_count"] <= SSD_COUNT_MAX or not 1 <= len(rates) <= 2 or 0 in rates:
        raise MachineError(
            f"--ssd {text}: pass 1 to {SSD_COUNT_MAX} drives with their capacity, the rate of"
            " reads and, if known, of writes, and the bytes that they endure, for example"
            ' "2TB,7GB/s,1.4GB/s,1200TBW", or "2x2TB,..." for two'
        )
    written = rates[1] if len(rates) == 2 else rates[0] // _WRITE_PART
    return {**made, "ssd_read_bytes_per_s": rates[0], "ssd_write_bytes_per_s": written}


def machine(gpu: str, ram: str, ssd: str) -> Machine:
    """Return a machine of parts.

    Args:
        gpu: a key of GPUS.
        ram: the installed main memory, such as "64GiB".
        ssd: the drives, such as "2TB,7GB/s,1200TBW".

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
    return Machine(
        name=f"{gpu}, {ram} of RAM, {ssd}",
        gpu_flop_per_s=round(tflops * share * 1e12),
        gpu_bytes=quantity("gpu_bytes", memory),
        link_in_bytes_per_s=link,
        link_out_bytes_per_s=link,
        host_bytes=host,
        adam_params_per_s=_ADAM_PARAMS_PER_S,
        **_drives(ssd),
    )
