"""Provide functions that the tests run in processes of their own."""

import os
import time


def rank(add: int) -> list[int]:
    """Return this rank, how many there are, and the rank plus ``add``."""
    number = int(os.environ["RANK"])
    return [number, int(os.environ["WORLD_SIZE"]), number + add]


def hang() -> None:
    time.sleep(600)


def fail() -> None:
    raise ValueError("it failed")


def die() -> None:
    print("last words", flush=True)
    os._exit(75)
