"""Fail before anything is trained: ``bad_start.py syntax|import|same|one|flake FOLDER``."""

import os
import sys
from pathlib import Path
from typing import Any

WHAT, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK = os.environ["RANK"]


def note() -> int:
    path = FOLDER / f"started-{RANK}"
    with path.open("a") as file:
        file.write(".")
    return len(path.read_text())


STARTS = note()
if WHAT == "syntax":
    compile("def f(:", "broken.py", "exec")
if WHAT == "import":
    import no_such_module_anywhere  # noqa: F401
if WHAT == "flake" and STARTS == 1 and RANK == "1":
    raise OSError("the file system was away")
if WHAT in ("same", "one"):
    from checkpointless import HPCallWrapper, HPWrapper

    bare: Any = HPWrapper  # a type checker knows the form with parentheses only

    @bare
    def main(caller: HPCallWrapper) -> None:
        note()
        if WHAT == "same" or (RANK == "1" and caller.generation == 0):
            raise ValueError("devices=4 with 3 ranks")
        print(f"done in generation {caller.generation}", flush=True)

    main()
