"""End, or not: arguments are ``RANK:WHAT`` for the ranks that stay, and ``plain`` for a script without a block."""

import atexit
import ctypes
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

OUT, RANK = Path(os.environ["CHECKPOINTLESS_RUN_DIR"]), os.environ["RANK"]
WHAT = dict(argument.split(":") for argument in sys.argv[1:] if ":" in argument).get(RANK, "")


def leave(what: str) -> None:
    (OUT / f"{what}-{RANK}").touch()


def work(seconds: float) -> None:
    """Compute for some seconds of processor time, as an upload does."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass
    leave("worked")


def wait_for_ever() -> None:
    threading.Event().wait(600)


def hold_the_lock() -> None:
    """Wait in C code with Python's lock held, as a destructor of torch's may."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def block(generation: int) -> None:
    if WHAT == "abandons" and generation == 0:
        threading.Thread(target=wait_for_ever, name="writer").start()
        raise ValueError("the loss is not a number")


atexit.register(leave, "atexit")
if "plain" not in sys.argv:
    from checkpointless.inprocess import HPCallWrapper, HPWrapper

    @HPWrapper()
    def main(caller: HPCallWrapper) -> None:
        block(caller.generation)

    main()
if WHAT == "thread":
    threading.Thread(target=wait_for_ever, name="uploader").start()
elif WHAT == "works":
    threading.Thread(target=work, args=(3.0,)).start()
elif WHAT == "child":
    multiprocessing.get_context("fork").Process(target=wait_for_ever, name="logger").start()
elif WHAT == "lock":
    atexit.register(hold_the_lock)
elif WHAT == "sleeps":
    time.sleep(600)
elif WHAT == "works on":
    work(3.0)
