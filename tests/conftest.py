"""For every test and every process that a test starts."""

import os

from hypothesis import HealthCheck, settings

# torch says so at import, in each process, where nvidia-resiliency-ext (NeMo's logger needs it) has brought pynvml.
os.environ.setdefault("PYTHONWARNINGS", "ignore:The pynvml package is deprecated:FutureWarning")

# How long an example takes says more of the machine, and of what else runs there, than of the code.
settings.register_profile("no-time", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no-time")
