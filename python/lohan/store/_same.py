"""Whether an open store belongs to a model, and may be used as a session was asked to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lohan.common._rules import RULES
from lohan.errors import StoreError, StoreMismatchError, StoreUncleanError
from lohan.layout import _experts
from lohan.store import _average, _store

if TYPE_CHECKING:
    from lohan import _core
    from lohan.config import Config
    from lohan.layout._block import Layout
    from lohan.store._store import Extents

SAME_KEYS = ("lohan", "params", "units")  # keys of meta that must be equal for the same model


@contextlib.contextmanager
def reopened(directories: Sequence[str], config: Config, layout: Layout) -> Iterator[_core.Store]:
    """Return a context with the store of a closed session, for reading.

    Raises:
        StoreError: the store does not exist, cannot be opened, or belongs to a different model.
    """
    for directory in directories:
        path = os.path.join(directory, "lohan.data")
        if not os.path.exists(path):
            raise StoreError(
                f"the session is closed, and {path}, which has the parameters, does not exist (a"
                " temporary store is removed with its session): restore the file, or build the"
                " model again"
            )
    store = _store.open_existing(directories, config, read_only=True)
    try:
        check_same_model(store, layout)
        yield store
    finally:
        store.close()


def check_same_model(store: _core.Store, layout: Layout) -> None:
    """Reject a store that was never filled, or that belongs to a different model.

    Raises:
        StoreUncleanError: the store's creation was interrupted before the weights were written.
        StoreMismatchError: the models differ; the message names the first difference.
    """
    from lohan.common import _meta

    if store.describe()["is_empty"]:
        path = store.describe()["files"][0][0]
        raise StoreUncleanError(
            f"{path} was created, but its weights were never written, because its creation, or a"
            " copy to this place, was interrupted: copy the store again if this is a copy,"
            " otherwise delete it and start again from the weights"
        )
    theirs = _meta.of(store)
    _store.check_groups(theirs, layout.groups, store.describe()["files"][0][0])
    take_strides(layout, theirs)
    check_same_rule(theirs, layout)
    check_same_states(theirs, layout)
    _average.check_same(theirs, layout)
    ours = _store.describe(layout)
    check_same_name(theirs, layout)
    if theirs["units"] != ours["units"] and sorted(theirs["params"]) == sorted(ours["params"]):
        raise StoreMismatchError(
            "the store has the same parameters in other blocks: omit blocks= to use the blocks that"
            " the store was created with"
        )
    check_same_method(theirs.get("method"), layout.method)
    if all(theirs.get(key) == ours[key] for key in SAME_KEYS):
        _store.check_part(theirs, layout)
        return
    is_reordered = sorted(theirs["params"]) == sorted(ours["params"])
    for index, (a, b) in enumerate(zip(theirs["params"], ours["params"], strict=False)):
        if a != b and is_reordered:
            raise StoreMismatchError(
                f"the store has the same {len(ours['params'])} parameters in another order: number"
                f" {index} is {a[0]!r} in the store and {b[0]!r} in this model: define the modules"
                " in the order that they had when the store was created"
            )
        if a != b:
            raise StoreMismatchError(
                "the store belongs to another model: it has parameter"
                f" {a[0]!r} {a[1]} {a[2]} trainable={a[3]}, this model has"
                f" {b[0]!r} {b[1]} {b[2]} trainable={b[3]}{_experts.advice(a[0], b[0])}"
            )
    count = len(theirs["params"]), len(ours["params"])
    if count[0] != count[1]:
        raise StoreMismatchError(
            f"the store belongs to another model: {count[0]} parameters, this model has {count[1]}"
        )
    raise StoreMismatchError(
        f"{store.describe()['files'][0][0]}: the store's description (meta) has version"
        f" {theirs['lohan']}, but its parameters are described by version {ours['lohan']}: it is"
        " damaged, or from another version of lohan: go back to a snapshot, or use the version that"
        " created it"
    )


def take_strides(layout: Layout, meta: dict[str, Any]) -> None:
    """Set the parameters' strides to those in the store's meta, in whose order it stores bytes."""
    if len(meta["params"]) != len(layout.params):
        return  # a different model, which is rejected elsewhere
    for param in layout.params:
        strides = _store.strides_of(meta, param.index)
        if strides != param.strides:
            layout.other_strides.append(param.name)
            param.strides = strides


def check_same_rule(theirs: dict[str, Any], layout: Layout) -> None:
    """Reject an update rule other than the one that the store was created with.

    Raises:
        StoreMismatchError: the rules differ; the message names both.
    """
    was, others = theirs.get("rule", "adamw"), theirs.get("others", [])
    if was == layout.rule and others != layout.others:
        raise StoreMismatchError(
            "the store was created with other parameters in groups with use_muon=True: pass params="
            " with the same ones"
        )
    if was != layout.rule and (theirs.get("method") or layout.method) is None:
        raise StoreMismatchError(
            f"the store was created for {RULES[was].title}, not {RULES[layout.rule].title}: pass"
            f" {RULES[was].call} without an optimizer= of another rule, or start a new store with"
            " lohan.export(STORE, OUT) and weights=OUT (the moments are lost)"
        )


def check_same_states(theirs: dict[str, Any], layout: Layout) -> None:
    """Reject states= other than the one that the store was created with.

    Raises:
        StoreMismatchError: the formats differ; the message names both.
    """
    was = theirs.get("states", "fp32")
    if was != layout.states and (theirs.get("method") or layout.method) is None:
        raise StoreMismatchError(
            f"the store was created with moments={was!r}, not {layout.states!r}: pass"
            f" moments={was!r}"
            f" to continue with its moments, or make a store with converted ones by lohan convert"
            f" STORE OUT --states {layout.states} (lohan.convert)"
        )


def check_same_name(theirs: dict[str, Any], layout: Layout) -> None:
    """Reject a training method other than the one that the store was created with.

    Raises:
        StoreMismatchError: one of the methods is "mezo" and the other is not; it names both.
    """
    was, now = theirs.get("method"), layout.method
    if (was is None) != (now is None):
        rule = RULES[layout.rule if was is not None else theirs.get("rule", "adamw")]
        calls = [rule.call, 'method="mezo"']
        if was is not None:
            calls.reverse()
        raise StoreMismatchError(
            f"the store was created with {calls[0]}, not {calls[1]}: pass the former, or start a"
            " new store with lohan.export(STORE, OUT) and weights=OUT"
        )


def check_same_method(theirs: dict[str, Any] | None, ours: dict[str, Any] | None) -> None:
    """Reject different sets of trainable or weight-decayed parameters of method="mezo".

    Raises:
        StoreMismatchError: one of these differs; the message names it.
    """
    for key, what in (("streams", "that require a gradient"), ("decays", "with weight decay")):
        if theirs is not None and ours is not None and theirs[key] != ours[key]:
            raise StoreMismatchError(
                f"the store was created with other parameters {what}, and the journal's steps"
                " depend on them: use the same ones"
            )


def check_slots(store: _core.Store, config: Config) -> None:
    """Reject commits for a store that was created with a single slot.

    Raises:
        StoreMismatchError: the store has a single slot, but commit_every requires commits.
    """
    if store.describe()["is_single_slot"] and config.commit_every != "never":
        raise StoreMismatchError(
            "the store was created with IO(single_slot=True) and keeps one copy of each value,"
            f" which commit_every={config.commit_every!r} would overwrite: pass"
            " io=lohan.IO(single_slot=True) here, too. Copies by lohan.snapshot() also keep one"
            " copy. For a"
            " store with two copies, use lohan.export(STORE, OUT, dtype='float32') and start a new"
            " run with weights=OUT (the moments are lost)"
        )


def check_table(store: _core.Store, extents: Extents) -> None:
    """Reject a store whose extents do not match the layout, since its description is then wrong.

    Raises:
        StoreMismatchError: the extents differ; the message states the sizes of both.
    """
    is_single = store.describe()["is_single_slot"]
    has = [(nbytes, group) for nbytes, group, _, _ in store.extents()]
    is_other = has != extents.table
    if not is_other and not is_single:
        # Stores that have all checksums of files read in place never write these again.
        sums = extents.table[extents.checksums][1] if extents.checksums >= 0 else -1
        is_other = any(
            slots < (1 if group == sums else extents.groups[group])
            for _, group, slots, _ in store.extents()
        )
    if is_other:
        raise StoreMismatchError(
            f"{store.describe()['files'][0][0]}: the store's description (meta) is damaged, or from"
            f" another version of lohan: it lists {len(extents.table)} extents of"
            f" {sum(n for n, _ in extents.table):,} bytes, but the store has {len(has)} of"
            f" {sum(n for n, _ in has):,}, or fewer slots: go back to a snapshot"
        )
