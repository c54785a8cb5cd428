"""Define which faults disturb users' runs, and what of their end may then differ."""

from dataclasses import dataclass
from functools import partial

from tests.ranks.users.end import IN_ALL
from tests.ranks.users.runs import Run

#: A fit that was over is called once more and finds nothing to do.
CALLED_AGAIN = IN_ALL | {"hooks"}
#: What follows a fit that was over is done again with other weights, as a warning says.
NOT_REFITTED = CALLED_AGAIN | {"validations"}
#: That something was done once in all can be required only where all ranks have reached each other in the step of
#: the fault.
ONCE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Case:
    name: str
    run: Run
    faults: tuple[str, ...]
    apart: frozenset[str] = IN_ALL
    saves_end_before: int = 0
    is_long: bool = False


long_case = partial(Case, is_long=True)

EP2 = ("--expert-parallel", "2")
EXPERTS = Run("moe-bias,global-aux-loss", layout=EP2, nproc=4)
FP16 = Run("fp16", 8)
BATCHNORM = Run("batchnorm", script="plain_loop.py", nproc=3)
OWN_BUFFERS = Run("batchnorm,own-buffers,randperm", script="plain_loop.py", nproc=3)
LARGE = Run("large-buffers,randperm", script="plain_loop.py", nproc=3)
VALIDATES_SHUFFLED = Run("validation,cyclic", layout=EP2, nproc=4)
VALIDATES = Run("validation,then-validate", (3, 6))
OWN = Run("own-buffers,shuffled,epochs", 8, nproc=4)
OWN_GENERATOR = Run("own-buffers,shuffled,own-generator,epochs", 8, nproc=4)
RANDPERM = Run("randperm", script="plain_loop.py", nproc=3)
# What they keep has nothing to do with each other, and one undisturbed run does for all.
KEEPERS = Run("ema,module-state,callback-hooks,csv,tensorboard")
SAVES = Run("modelckpt", 7)
BACKGROUND = Run("modelckpt,async-save", 7)
STOPS = Run("earlystop,plateau", 10)
RESUMED = Run("own-data,csv", 8, resumed=4)
SHORT_LONG, LONG_SHORT = Run("", (3, 6)), Run("", (6, 3))
SHUFFLED_BY_WORKERS = Run("epochs,cyclic,workers", 8)
MONITORED = Run("monitored,dated", 6)
METRICS = Run("epochs,epoch-metrics,module-state", 8, nproc=4)
STARTS = Run("start-hooks")

#: The other ranks have gone on to the next step by then.
LATE = ("slow@after_optimizer:rank=1,step=4,seconds=2", "exception@after_optimizer:rank=1,step=4")

#: And here the others have not: what follows the third step is gone through again.
SLOW = "slow@after_optimizer:rank=2,step=3,seconds=2"

CASES = (
    # 5: what changes before the vote is taken back
    long_case(
        "expert bias, before the update",
        EXPERTS,
        ("exception@before_optimizer:rank=1,step=3", "sigkill@before_optimizer:rank=2,step=5"),
    ),
    long_case(
        "loss scale, before the update",
        FP16,
        ("exception@before_optimizer:rank=1,step=5", "sigkill@before_optimizer:rank=0,step=7"),
    ),
    long_case(
        "batch norm, before the update",
        BATCHNORM,
        ("exception@before_optimizer:rank=1,step=4", "sigkill@before_optimizer:rank=1,step=5"),
    ),
    # ranks' own buffers
    Case(
        "own buffers, kills around the update",
        OWN_BUFFERS,
        (
            "sigkill@before_optimizer:rank=1,step=1",
            "sigkill@between:rank=1,step=3",
            "sigkill@before_optimizer:rank=0,step=4",
            "sigkill@after_optimizer:rank=0,step=5",
        ),
    ),
    long_case(
        "own buffers of Megatron's",
        OWN,
        ("exception@optimizer:rank=1,step=3", "sigkill@optimizer:rank=2,step=4", "sigkill@forward:rank=3,step=6"),
    ),
    # 6, 7, 16: callbacks' state is that of the step, also what hooks in pairs keep; folders
    Case(
        "average, hooks in pairs, loggers' folders",
        KEEPERS,
        (
            "exception@backward:rank=1,step=2",
            "exception@after_optimizer:rank=1,step=3",
            "sigkill@after_optimizer:rank=1,step=4",
            "sigkill@forward:rank=0,step=6",
        ),
    ),
    # 8: checkpoints of the step of the fault: one is due every two steps, and the last after step 7
    Case(
        "checkpoints, kills",
        SAVES,
        (
            "sigkill@after_optimizer:rank=1,step=2",
            "sigkill@between:rank=0,step=4",
            "sigkill@after_optimizer:rank=1,step=7",
        ),
    ),
    long_case(
        "a monitored checkpoint in NeMo's folder",
        MONITORED,
        ("exception@forward:rank=1,step=4", "exception@between:rank=1,step=4", "sigkill@forward:rank=0,step=6"),
    ),
    long_case(
        "checkpoints in the background, exceptions",
        BACKGROUND,
        (
            "exception@forward:rank=1,step=3",
            "exception@between:rank=1,step=4",
            "exception@after_optimizer:rank=1,step=6",
        ),
    ),
    # Its writers have not ended by then: nothing of what it saves has changed yet, and it is made again
    long_case(
        "one in the background, sigkill in the next step",
        BACKGROUND,
        ("sigkill@forward:rank=1,step=5",),
        saves_end_before=4,
    ),
    long_case(
        "the last one in the background, sigterm",
        BACKGROUND,
        ("sigterm@optimizer:rank=1,step=7",),
        saves_end_before=7,
    ),
    # 9: a finished validation is not repeated
    Case("early stop and plateau, sigkill", STOPS, ("sigkill@before_optimizer:rank=1,step=5",), apart=ONCE),
    long_case(
        "shuffled validations",
        VALIDATES_SHUFFLED,
        ("sigkill@forward:rank=2,step=4", "exception@forward:rank=1,step=5"),
    ),
    # 10: resumed, then hit
    Case(
        "resumed",
        RESUMED,
        (
            "exception@forward:rank=1,step=6",
            "exception@after_optimizer:rank=1,step=7",  # the step is gone through again, without being computed
            "sigkill@forward:rank=0,step=8",
        ),
    ),
    # 11: the second fit
    long_case(
        "in the second fit",
        SHORT_LONG,
        ("exception@sync:rank=0,step=5", "exception@forward:rank=1,step=6", "sigkill@forward:rank=0,step=8"),
        apart=CALLED_AGAIN,
    ),
    # NeMo's sampler counts what workers fetch ahead: Lightning sees 3 steps in an epoch of 4, faults or not
    long_case(
        "shuffled, with workers",
        SHUFFLED_BY_WORKERS,
        ("exception@forward:rank=1,step=3", "sigkill@forward:rank=0,step=5"),
    ),
    # What is accumulated over an epoch is all of it, and each rank's own
    long_case(
        "metrics of the epoch, exceptions",
        METRICS,
        ("exception@after_optimizer:rank=1,step=3", "exception@forward:rank=2,step=7"),
    ),
)
