"""What the exchanges of a session have taken: bytes, and times. Any thread."""

from __future__ import annotations

import threading
import time

from lohan.common._stats import Traffic


class Meter:
    """Counts what is sent and received, and how long that and waiting for it has taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of all that follows
        self._sent_bytes = 0
        self._received_bytes = 0
        self._send_busy_ns = 0
        self._peer_wait_ns = 0
        self._sends = 0  # messages that are being sent
        self._sends_since = 0  # when the first of them began

    @property
    def traffic(self) -> Traffic:
        """What all exchanges so far have taken."""
        with self._lock:
            now = time.monotonic_ns()
            busy_ns = self._send_busy_ns + (now - self._sends_since if self._sends else 0)
            return Traffic(self._sent_bytes, self._received_bytes, busy_ns, self._peer_wait_ns)

    def count(self, *, sent: int = 0, received: int = 0) -> None:
        """Count the bytes of messages."""
        with self._lock:
            self._sent_bytes += sent
            self._received_bytes += received

    def count_sends(self, change: int) -> None:
        """Count messages that begin to be sent, or as a negative number those that were sent."""
        now = time.monotonic_ns()
        with self._lock:
            if self._sends == 0:
                self._sends_since = now
            self._sends += change
            if self._sends == 0:
                self._send_busy_ns += now - self._sends_since

    def waited(self, began_ns: int) -> None:
        """Count the time since began_ns as waiting of the training thread for other processes."""
        with self._lock:
            self._peer_wait_ns += time.monotonic_ns() - began_ns
