"""The names of the events in a run's log, and which of them are stages of an incident."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class EventName(str, enum.Enum):
    """What an event of the log reports. A member is equal to its name, and is written as it."""

    # The job, from its begin to its end.
    JOB = "job"  # the job began on a node, or has ended
    PRELOAD = "preload"  # a node has imported what its ranks need
    GO = "go"  # all ranks are present: a generation begins
    PROGRESS = "progress"  # the newest step that is known to be committed, once a minute
    STALL = "stall"  # no rank gets on, but none is taken for hung yet
    STACK = "stack"  # where the main thread of a rank that hangs is
    ADOPT = "adopt"  # a new coordinator has taken over the job in progress
    BACK = "back"  # a node that was not connected is connected again
    DEVICE_CHECK = "device_check"  # a rank is to be started again, and its device has passed the check, or not
    MOVED = "moved"  # a spare has taken the ranks of a node over, which is idle now
    BAD_DEVICE = "bad_device"  # a rank's device must not be used, and what is done about it
    TRAINED = "trained"  # a rank has made its last step
    INEXACT = "inexact"  # a step is another one when it is made again: so is what follows it
    STRAGGLER = "straggler"  # a rank is slow by itself, and the others wait for it, from begin to end
    CORRUPTED = "corrupted"  # a rank has computed a gradient wrongly, which was found before the update
    SAVED = "saved"  # rank 0 has made a checkpoint, for which training stood still, or has begun to write one
    SAVE_FAILED = "save_failed"  # a checkpoint could not be saved, and why; training goes on

    # The stages of an incident, in their order.
    DETECT = "detect"  # the cause of an incident is known, or is known better
    NOTIFY = "notify"  # a node tells its ranks
    ABORT = "abort"  # a rank stops what it is doing
    FINALIZE = "finalize"  # a rank cleans up after the block
    HEALTH = "health"  # a rank checks whether its process can go on
    BARRIER = "barrier"  # a rank waits until all are present
    ENTER = "enter"  # a rank runs the user's function up to its process groups
    INIT = "init"  # a rank sets up its process groups
    REBUILD = "rebuild"  # a rank builds the trainer, the model and the optimizer again
    DECIDE = "decide"  # the ranks agree on the step to resume after, and on who fills whom
    TRANSFER = "transfer"  # the state goes to its new place, and to the ranks that lack it
    VERIFY = "verify"  # the ranks compare digests of the state
    DATA = "data"  # a rank fetches its first batch
    FIRST_STEP = "first_step"  # a rank makes its first step

    # What else happens in an incident.
    RESPAWN = "respawn"  # a rank gets a new process
    HAND_OVER = "hand_over"  # a process hands its state to its successor, and ends
    RUNG = "rung"  # the recovery escalates, and why
    WARM = "warm"  # whether a rank keeps its model built over the fault, and why not
    DATASETS = "datasets"  # whether a data module gets its datasets back, and why not
    COPIES = "copies"  # no living rank holds a part of the state: each rank is filled from a copy in a tier
    FALLBACK = "fallback"  # the state comes from storage, and why
    RECOVERED = "recovered"  # the step that the incident interrupted is made, or the block has returned without one
    ESCALATED = "escalated"  # the next fault came before the interrupted step was made
    SETTLED = "settled"  # a rank's memory after a few steps of the new generation

    FAULT_INJECTED = "fault_injected"  # a fault is caused on purpose; written just before it
    EVENTS_DROPPED = "events_dropped"  # a process had to drop ``count`` events; written as soon as it can write

    def __str__(self) -> str:
        return self.value

    @classmethod
    def of(cls, word: str) -> EventName | str:
        """Return the event that ``word`` names, or ``word`` itself: the log of a newer version may name others."""
        try:
            return cls(word)
        except ValueError:
            return word


#: In the place of a tier's name: a rank needs no copy, since it lives and has the very state.
LIVING = "living rank"

#: The stages of an incident, in the order in which they occur, by phase; each phase has one colour in the bars.
PHASES: Mapping[str, tuple[EventName, ...]] = {
    "notice": (EventName.DETECT, EventName.NOTIFY),
    "stop": (EventName.ABORT, EventName.FINALIZE, EventName.HEALTH),
    "meet": (EventName.BARRIER,),
    "rebuild": (EventName.ENTER, EventName.INIT, EventName.REBUILD),
    "restore": (EventName.DECIDE, EventName.TRANSFER, EventName.VERIFY),
    "resume": (EventName.DATA, EventName.FIRST_STEP),
}
STAGES = tuple(stage for stages in PHASES.values() for stage in stages)


# --- How far up a recovery goes -----------------------------------------------------------------------------------


class Rung(enum.IntEnum):
    """The level to which a recovery escalates."""

    IN_PROCESS = 0  # the block runs again in the living process
    OWN_STATE = 1  # ranks get new processes, to which the old ones hand their state
    PROCESS = 2  # a rank gets a new process, and its state from replicas
    NODE = 3  # another node replaces a lost one
    JOB = 4  # all ranks start again from storage

    @property
    def label(self) -> str:
        """The name of the level in events and tables."""
        return self.name.lower().replace("_", "-")
