"""What lohan has written to stderr, apart from the lines of every session."""

from __future__ import annotations

import re

_OPENING = r"(?:new|resumed|temporary) store .* at step \d+; .*"
_CLOSING = r"closed store .*: \d+ steps? in this session, .*"
_VALUES = r"values: .*"
_LINE = re.compile(rf"^lohan: (?:{_OPENING}|{_CLOSING}|{_VALUES})\n", re.M)


def notes(said: str) -> str:
    """Return a text without the lines in which sessions say what they opened and did."""
    return _LINE.sub("", said)
