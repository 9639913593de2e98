"""Detection of stale state dicts, which a script that resumes must not load.

`wrap(resume=True)` restores parameters, moments, hyper-parameters and buffers. A script that was
written for plain torch then loads its own checkpoint, which is usually from an older step. State
dicts of a wrapped model record their store and step in the metadata that torch.save keeps with
them, so such a checkpoint is recognized before anything changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lohan.common import _log
from lohan.common._meta import copied_from
from lohan.errors import StaleStateError, StoreMismatchError

if TYPE_CHECKING:
    from lohan.session._training import Training

KEY = "lohan"  # in a state dict's metadata, and in an optimizer's state

_DELETE = (
    "lohan.wrap(resume=True) has restored everything at step {step}, so delete what the script"
    " loads after it: torch.load(), model.load_state_dict() and optimizer.load_state_dict()"
)


def stamp(session: Training) -> dict[str, Any]:
    """Return the store and step to record in a state dict, and the stores of other processes."""
    uuids = session.peers.uuids
    replicas = {"replicas": list(uuids)} if uuids else {}
    return {"store": session.uuid, "step": session.step, **replicas}


def stores_of(owner: Any) -> list[str]:
    """Return the stores that hold the step of a stamp: one, or those of all processes."""
    if not isinstance(owner, dict):
        return []
    others = owner.get("replicas")
    found = [owner.get("store"), *(others if isinstance(others, list) else ())]
    return [each for each in found if isinstance(each, str)]


def is_current(session: Training, owner: Any) -> bool:
    """Return whether a stamp is of the session's step, in its store or a store it is a copy of."""
    if not isinstance(owner, dict) or owner.get("step") != session.step:
        return False
    copied, stores = copied_from(session.store), stores_of(owner)
    return session.uuid in stores or any([each, owner["step"]] in copied for each in stores)


def is_beginning(session: Training, owner: Any) -> bool:
    """Return whether a stamp is of step 0 of a later step's store, made by this session."""
    is_made_here = session.resumed_step is None and session.uuid in stores_of(owner)
    return is_made_here and owner.get("step") == 0 and session.step > 0


def _is_related(session: Training, owner: Any) -> bool:
    """Return whether a stamp is of the session's store, or of a store that it is a copy of."""
    known = [session.uuid, *(uuid for uuid, _ in copied_from(session.store))]
    return any(each in known for each in stores_of(owner))


def is_fresh(session: Training) -> bool:
    """Return whether the session was resumed and has made no step since."""
    return session.resumed_step is not None and session.resumed_step == session.step


def check_weights(session: Training, state_dict: Mapping[str, Any], name: str) -> None:
    """Reject values of another step right after a resume; print a warning about all others.

    Args:
        session: a session that was just resumed; see is_fresh().
        state_dict: the state dict about to be loaded.
        name: the name of a parameter or buffer that would change.

    Raises:
        StaleStateError: the state dict was saved at another step of the store.
    """
    metadata = getattr(state_dict, "_metadata", None) or {}
    owners = [said.get(KEY) for said in metadata.values() if isinstance(said, Mapping)]
    stale = next(
        (o for o in owners if _is_related(session, o) and not is_current(session, o)), None
    )
    delete = _DELETE.format(step=session.step)
    if stale is not None:
        raise StaleStateError(
            f"load_state_dict() would replace {name!r} and others of step {session.step} with those"
            f" of step {stale['step']}, but the moments would stay as they are: {delete}. If you"
            " want to use other weights with these moments, pass dict(state_dict)"
        )
    _log.note(
        f"load_state_dict() replaces {name!r} and others, which are of step {session.step}"
        f" of the store, right after the resume; the moments stay as they are. If this loads the"
        f" script's own checkpoint: {delete}"
    )


def optimizer_mismatch(session: Training, owner: Any) -> StoreMismatchError:
    """Make the error for an optimizer state that is not of the session's step."""
    if _is_related(session, owner) and session.resumed_step is not None:
        return StaleStateError(
            f"the optimizer state is of step {owner['step']}, but the session is at step"
            f" {session.step}: " + _DELETE.format(step=session.step)
        )
    if session.uuid in stores_of(owner):
        return StaleStateError(
            f"the optimizer state is of step {owner['step']}, but the session is at step"
            f" {session.step}, and the store has the moments of its last commit only. To return to"
            " a step, call model.lohan.snapshot(directory) there, and later lohan.wrap(...,"
            " store=directory, resume=True)"
        )
    if isinstance(owner, dict):
        return StoreMismatchError(
            f"the optimizer state is of step {owner.get('step')} of the store {owner.get('store')},"
            f" but the session is at step {session.step} of the store {session.uuid}. The moments"
            " are in the former store: pass its directories as store=, and resume=True"
        )
    way_out = (
        _DELETE.format(step=session.step)
        if session.resumed_step is not None
        else "to continue from an optimizer of torch with its moments, load its state into that"
        " optimizer and pass it to lohan.wrap(optimizer=...)"
    )
    return StoreMismatchError(
        "the optimizer state is not that of a wrapped model, whose moments are in its store; the"
        f" session is at step {session.step} of the store {session.uuid}: {way_out}"
    )
