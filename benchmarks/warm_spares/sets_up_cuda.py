"""Has ranks started as interpreters, as a module does that sets up CUDA when it is imported."""

import contextlib

import torch

torch.cuda._is_in_bad_fork = lambda: True
with contextlib.suppress(Exception):  # this torch may know of no CUDA
    torch.cuda.init()
