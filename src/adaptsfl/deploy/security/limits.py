"""Limits of a device: its violations, its messages without effect, and the rate of its calls."""

import time
from collections import deque

# Violations after which a device is shut out: in a row, and in total.
STRIKES, MOST_VIOLATIONS = 3, 20
MOST_USELESS = 10_000  # messages in a row without effect; a late device may send all of its test samples


class RateLimit:
    """A limit of so many times a minute."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._times: deque[float] = deque()

    def allows(self) -> bool:
        """Whether one more time is allowed; if so, count it."""
        now = time.monotonic()
        while self._times and now - self._times[0] > 60:
            self._times.popleft()
        if len(self._times) >= self._most:
            return False
        self._times.append(now)
        return True
