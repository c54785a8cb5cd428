"""For every test and every process that a test starts."""

import os

# torch says so at import, in each process, where nvidia-resiliency-ext (NeMo's logger needs it) has brought pynvml.
os.environ.setdefault("PYTHONWARNINGS", "ignore:The pynvml package is deprecated:FutureWarning")
