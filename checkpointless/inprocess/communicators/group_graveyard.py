"""Release the process groups of earlier generations without making any other thread wait.

The destructor of a gloo group joins its threads, and a thread that waits for an operation that gloo has lost
(see :mod:`checkpointless.inprocess.communicators.gloo_wait`) does not end before the group's timeout, 30 minutes by
default. A group is therefore held here until nothing else refers to it, and then released in a separate thread.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

_buried: list[Any] = []
_REFERENCES = 4  # this list, the one added by bury(), the variable of reap(), and the argument of getrefcount()


def bury(groups: list[Any]) -> None:
    """Hold ``groups`` until :func:`reap` finds no other reference, if necessary past the interpreter's end."""
    held = {id(group) for group in _buried}
    for group in groups:
        if id(group) not in held:
            held.add(id(group))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            _buried.append(group)


def reap() -> None:
    """Release every group that nothing else refers to any more. Call this after the garbage collector has run."""
    index = 0
    while index < len(_buried):
        group = _buried[index]
        if sys.getrefcount(group) > _REFERENCES:
            index += 1
            continue
        holder = [_buried.pop(index)]
        del group  # before the thread starts: whichever thread drops the last reference waits for the destructor
        threading.Thread(target=_let_go, args=(holder,), name="checkpointless-reaper", daemon=True).start()


def _let_go(holder: list[Any]) -> None:
    group = holder.pop()
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))
    del group  # the destructor runs here, without the GIL
