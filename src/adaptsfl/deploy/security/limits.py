"""How much a device may do: what it breaks, sends in vain or does too often has an end."""

import time
from collections import deque

# Violations after which a device is shut out: in a row, and in all.
STRIKES, MOST_VIOLATIONS = 3, 20
MOST_USELESS = 10_000  # messages in a row that lead to nothing; a device that is late may send all of its test samples


class RateLimit:
    """At most so many times a minute."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._times: deque[float] = deque()

    def allows(self) -> bool:
        """Whether it may be once more, which then counts."""
        now = time.monotonic()
        while self._times and now - self._times[0] > 60:
            self._times.popleft()
        if len(self._times) >= self._most:
            return False
        self._times.append(now)
        return True
