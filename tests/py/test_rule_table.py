"""The table of update rules in lohan.common._rules is that of csrc/compute/rule.c."""

from __future__ import annotations

from lohan import _core
from lohan.common._rules import RULES


def test_the_table_of_python_is_that_of_the_core() -> None:
    ours = [
        (r.name, "moment1" in r.moments, "moment2" in r.moments, r.has_rows, r.has_factors)
        for r in RULES.values()
    ]
    assert tuple(ours) == _core.rules()
    for rule in RULES.values():
        group = {**rule.defaults, "lr": 0.25}
        rule.put(again := {}, rule.hyper_of(group))
        names = rule.defaults.keys() - {"adjust_lr_fn"}  # which the engine does not take
        assert again == {name: again[name] for name in names}
        assert rule.hyper_of(again) == rule.hyper_of(group)
