"""The golden rows of csrc/plan's equations have the values of exact fractions.

This test compares tests/golden/plan_costs.csv with the papers' formulas, which are repeated here in
fractions and with the papers' own letters; tests/c/test_plan_costs.c compares the core with the
same file. LH_GOLDEN_WRITE=1 rewrites it.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import pathlib
from fractions import Fraction

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "plan_costs.csv"

# The inputs of an equation's row, by the papers' letters.
INPUTS = "P FLOP_f THP_G BW_in BW_out BW_S2M BW_M2S MEM adam_per_s A FLOP_r".split()
HEAD = ["row", *INPUTS, "expected"]


@dataclasses.dataclass(frozen=True)
class Case:
    """The exact inputs of the equations."""

    P: int
    FLOP_f: int
    THP_G: int
    BW_in: int
    BW_out: int
    BW_S2M: int
    BW_M2S: int
    MEM: int
    adam_per_s: int


# (FLOP, bytes, is inter-block): two blocks of a transformer, and a head that saves nothing.
LAYERS = [
    (0, 0, False),
    *[
        (6_291_000, 4_000, False),
        (838_860, 1_000, False),
        (2_097_001, 1_000, False),
        (8_388_607, 9_000, False),
        (8_388_608, 1_000, True),
    ]
    * 2,
    (12_345_678, 0, False),
]
LAYERS_FLOP = sum(layer[0] for layer in LAYERS)


def lohan_parts(case: Case, A: int, FLOP_r: int) -> dict[str, Fraction]:
    """Compute LoHan eqs. 3 to 5, part by part."""
    q = Fraction
    alpha_A = max(A - case.MEM, 0)
    p2, p14 = 2 * case.P, 14 * case.P
    return {
        "lohan-3": q(alpha_A),
        "lohan-4-gpu": q(case.FLOP_f, case.THP_G),
        "lohan-4-out": q(A, case.BW_out),
        "lohan-4-in": q(p2, case.BW_in),
        "lohan-4-ssd": q(p2, case.BW_S2M) + q(alpha_A, case.BW_M2S),
        "lohan-5-gpu": q(2 * case.FLOP_f + FLOP_r, case.THP_G),
        "lohan-5-out": q(p2, case.BW_out),
        "lohan-5-in": q(p2 + A, case.BW_in),
        "lohan-5-ssd": q(p14 + alpha_A, case.BW_S2M) + q(p14, case.BW_M2S),
    }


def lohan_rows(case: Case, A: int, FLOP_r: int) -> dict[str, Fraction]:
    """Compute LoHan eqs. 1 to 6; eq. 6 for a layer with FLOP_f and A."""
    parts = lohan_parts(case, A, FLOP_r)
    T_f = max(value for name, value in parts.items() if name.startswith("lohan-4"))
    T_b = max(value for name, value in parts.items() if name.startswith("lohan-5"))
    rows = {"lohan-1": T_f + T_b, "lohan-2": T_f, **parts}
    return {**rows, "lohan-6": Fraction(case.FLOP_f, A)} if A else rows


def fuyou_rows(case: Case, D_f: int, FLOP_r: int) -> dict[str, Fraction]:
    """Compute Fuyou eqs. 1 to 10 and 12; eq. 12 for a layer with FLOP_f and D_f."""
    q = Fraction
    p = case.P
    T_f_comp = q(case.FLOP_f, case.THP_G)
    T_o_comp = q(p, case.adam_per_s)
    T_f_GPU = max(q(2 * p, case.BW_in), q(D_f, case.BW_out))
    T_f_SSD = q(2 * p, case.BW_S2M) + q(D_f, case.BW_M2S)
    T_b_GPU = max(q(2 * p, case.BW_out), q(2 * p + D_f, case.BW_in))
    T_b_SSD = q(14 * p + D_f, case.BW_S2M) + q(14 * p, case.BW_M2S)
    T_b_comp = 2 * T_f_comp + q(FLOP_r, case.THP_G)
    T_f = max(T_f_comp, T_f_GPU, T_f_SSD)
    T_bo = max(T_b_comp, T_o_comp, T_b_GPU, T_b_SSD)
    T_max = T_b_comp - max(T_b_GPU, T_b_SSD)
    D_max = max(T_max, q(0)) * min(case.BW_in, case.BW_out, case.BW_S2M, case.BW_M2S)
    rows = {
        "fuyou-1": T_f + T_bo,
        "fuyou-2": T_f,
        "fuyou-3": T_f_GPU,
        "fuyou-4": T_f_SSD,
        "fuyou-5": T_bo,
        "fuyou-6": T_b_GPU,
        "fuyou-7": T_b_SSD,
        "fuyou-8": T_b_comp,
        "fuyou-9": T_max,
        "fuyou-10": q(D_max.numerator // D_max.denominator),
    }
    return {**rows, "fuyou-12": case.FLOP_f / q(D_f, case.BW_out)} if D_f else rows


def benefit(layer: tuple[int, int, bool]) -> Fraction:
    """Return OB; a layer that saves nothing has more than any other."""
    return Fraction(layer[0], layer[1]) if layer[1] else Fraction(10**30)


def swap_order() -> list[tuple[int, int, bool]]:
    """Return inter-block layers first, then by decreasing benefit, later ones first."""
    return sorted(reversed(LAYERS), key=lambda layer: (not layer[2], -benefit(layer)))


def recompute_at(A: int) -> tuple[Fraction, Fraction]:
    """FLOP_r and its slope where A bytes are swapped. LoHan eqs. 7 and 8."""
    left = Fraction(LAYERS_FLOP)
    for flop, size, _ in swap_order():
        if A < size:
            return left - Fraction(flop * A, size), -Fraction(flop, size)
        A -= size
        left -= flop
    return left, Fraction(0)


def algorithm_1(case: Case) -> dict[str, Fraction]:
    """Return Algorithm 1's result for LAYERS, by trying every prefix instead of stopping early."""
    case = dataclasses.replace(case, FLOP_f=LAYERS_FLOP)
    inter = sum(size for _, size, is_inter in LAYERS if is_inter)
    order = swap_order()
    prefixes = []
    for count in range(len(order) + 1):
        A = sum(size for _, size, _ in order[:count])
        FLOP_r = LAYERS_FLOP - sum(flop for flop, _, _ in order[:count])
        free = count < len(order) and order[count][1] == 0
        if A >= inter and not free:
            prefixes.append((lohan_rows(case, A, FLOP_r)["lohan-1"], A, FLOP_r))
    # T_iter is convex in A: the first of the least ones is where the algorithm stops.
    T_iter, A, FLOP_r = min(prefixes, key=lambda prefix: (prefix[0], prefix[1]))
    last = prefixes[-1]
    kind = 2 if A == last[1] else 1 if A == inter else 3
    return {
        "alg1-bytes": Fraction(A),
        "alg1-flop": Fraction(FLOP_r),
        "alg1-case": Fraction(kind),
        "alg1-time": T_iter,
    }


def fuyou_queues(case: Case) -> dict[str, Fraction]:
    """Return what Fuyou swaps: 4h-to-h layers are D_start, the others in forward order."""
    case = dataclasses.replace(case, FLOP_f=LAYERS_FLOP)
    start = [layer for layer in LAYERS if layer[2] or layer[1] == 0]
    others = [layer for layer in LAYERS if layer not in start]
    D_start = sum(size for _, size, _ in start)
    rows = []
    for count in range(len(others) + 1):
        taken = [*start, *others[:count]]
        D_f = sum(size for _, size, _ in taken)
        FLOP_r = LAYERS_FLOP - sum(flop for flop, _, _ in taken)
        rows.append((fuyou_rows(case, D_f, FLOP_r), D_f))
    D_max = rows[0][0]["fuyou-10"]
    allowed = [row for row in rows if row[1] == D_start or row[1] <= D_max]
    best, D_f = min(allowed, key=lambda row: (row[0]["fuyou-1"], row[1]))
    return {"queues-bytes": Fraction(D_f), "queues-time": best["fuyou-1"]}


# 13B at batch 32 on the papers' server with 12, 3 and 1 SSDs, and small odd numbers.
SERVER = Case(
    12_848_143_360,
    868_990_187_765_760,
    155_000_000_000_000,
    21_000_000_000,
    20_000_000_001,
    28_000_000_000,
    27_000_000_007,
    64_000_000_000,
    1_100_000_000,
)
SWAPPED = (0, 13_421_772_800, 37_580_963_840, 214_748_364_800)
CASES = [
    SERVER,
    dataclasses.replace(SERVER, BW_S2M=19_500_000_000, BW_M2S=10_200_000_000, MEM=0),
    dataclasses.replace(SERVER, BW_S2M=6_500_000_000, BW_M2S=3_400_000_000, MEM=700_000_000_000),
]
# Machines for LAYERS on which Algorithm 1 ends in case 1, 2 and 3.
SMALL = Case(1009, 1, 4_000_037, 1499, 1511, 997, 1013, 3001, 211)
ALGORITHM_CASES = [
    dataclasses.replace(SMALL, THP_G=50_000_017),
    dataclasses.replace(SMALL, THP_G=100_003),
    SMALL,
    dataclasses.replace(SMALL, MEM=0),
    dataclasses.replace(SMALL, MEM=10**9, P=7),
]


def golden_text() -> str:
    """Return the text of the golden file."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEAD)

    def row(name: str, case: Case, A: int, FLOP_r: int, expected: Fraction) -> None:
        whole = expected.denominator == 1
        text = str(expected.numerator) if whole else repr(float(expected))
        writer.writerow([name, *dataclasses.astuple(case), A, FLOP_r, text])

    for case in CASES:
        for A in SWAPPED:
            FLOP_r = case.FLOP_f - case.FLOP_f * A // SWAPPED[-1]
            for name, expected in {
                **lohan_rows(case, A, FLOP_r),
                **fuyou_rows(case, A, FLOP_r),
            }.items():
                row(name, case, A, FLOP_r, expected)
    for flop, size, is_inter in LAYERS:
        row("layer", SMALL, size, flop, Fraction(int(is_inter)))
    for A in (0, 1, 1_999, 2_000, 3_000, 5_500, 31_999, 32_000):
        FLOP_r, slope = recompute_at(A)
        row("lohan-7", SMALL, A, 0, FLOP_r)
        row("lohan-8", SMALL, A, 0, slope)
    for case in ALGORITHM_CASES:
        for name, expected in {**algorithm_1(case), **fuyou_queues(case)}.items():
            row(name, case, 0, 0, expected)
    return out.getvalue()


def test_golden_rows_are_what_fractions_give() -> None:
    text = golden_text()
    if os.environ.get("LH_GOLDEN_WRITE"):
        GOLDEN.write_text(text)
    assert GOLDEN.read_text() == text


def test_golden_machines_reach_all_three_cases_of_algorithm_1() -> None:
    assert {int(algorithm_1(case)["alg1-case"]) for case in ALGORITHM_CASES} == {1, 2, 3}


def test_fuyou_takes_none_some_and_all_layers_on_golden_machines() -> None:
    taken = {int(fuyou_queues(case)["queues-bytes"]) for case in ALGORITHM_CASES}
    assert {2_000, 32_000} < taken, taken
