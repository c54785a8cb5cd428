"""``RANK:CODE`` arguments say which ranks leave their block by ``sys.exit``, in step 3, and with what."""

import ast
import os
import sys
import time

from checkpointless.inprocess import HPCallWrapper, HPWrapper

RANK = int(os.environ["RANK"])
CODES = dict(argument.split(":") for argument in sys.argv[1:])


@HPWrapper()
def main(caller: HPCallWrapper) -> str:
    for step in range(1, 6):
        caller.begin_step(step)
        time.sleep(0.05)
        if step == 3 and str(RANK) in CODES:
            code = ast.literal_eval(CODES[str(RANK)])
            if isinstance(code, str):
                raise SystemExit(code)
            sys.exit(code)
        caller.end_step()
    if any(code not in ("0", "None") for code in CODES.values()):
        time.sleep(30)  # another ends the job
    print(f"rank {RANK} is through", flush=True)
    return "returned"


print(f"rank {RANK} got {main()}", flush=True)
