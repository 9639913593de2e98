"""Copies that other processes request from a session, as an extension of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lohan.session._extension import Extension, Place
from lohan.store._files import REQUEST

if TYPE_CHECKING:
    from lohan.session._training import Training


class Copies(Extension):
    """Begins the copies that other processes have requested by files in the store's folders."""

    place = Place.COPIES

    def closed(self, session: Training) -> None:
        """Begin a copy of the step that was just closed, if there is a request."""
        for directory in session.directories:
            if os.path.lexists(os.path.join(directory, REQUEST)):
                from lohan.store import _requests

                _requests.answer(session, directory)
