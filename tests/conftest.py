"""Settings shared by all tests.

Property tests draw the same examples every time; HYPOTHESIS_PROFILE=explore draws new ones, and more of them.
"""

import os
import signal

from hypothesis import HealthCheck, settings

slow_is_fine = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **slow_is_fine)
settings.register_profile("explore", max_examples=5000, **slow_is_fine)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# Where tests run in the background of a script, Ctrl-C is ignored, and by every process that they start; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
