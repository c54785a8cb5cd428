"""Run a script of anybody's, named by the first argument, and let no destructor of its process groups run.

Gloo's joins threads, with the interpreter's lock if C++ had the last reference (as DDP's reducer
has). On a busy machine such a thread waits for that lock: https://github.com/pytorch/pytorch/issues/56297.
"""

import ctypes
import functools
import runpy
import sys
from typing import Any

import torch.distributed.distributed_c10d as c10d

make = c10d._new_process_group_helper


@functools.wraps(make)
def make_and_keep(*args: Any, **options: Any) -> Any:
    made = make(*args, **options)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made[0]))
    return made


c10d._new_process_group_helper = make_and_keep
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
