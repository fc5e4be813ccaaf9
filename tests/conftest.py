"""What holds for every tier: one thread per numeric library, no model hub, reproducible property tests."""

import os

# Read by the libraries when they are first imported, so set before any test module is. Several test processes with a
# pool of threads each are slower together than with one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from hypothesis import HealthCheck, settings

# The same examples in each CI run; no deadline, for a busy machine is not a slow function.
settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci" if os.environ.get("CI") else "local")
