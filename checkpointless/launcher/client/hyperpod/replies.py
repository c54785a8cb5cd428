"""What the vendor's client replies, checked before anything is done with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Start:
    """The vendor's agent has started the job, or started it again.

    Attributes:
        generation: the ``JOB_RESTART_COUNT``.
        rank: this process's rank.
        world_size: the number of ranks.
        env: what the agent wants in this process's environment.
    """

    generation: int
    rank: int
    world_size: int
    env: dict[str, str]

    @classmethod
    def of(cls, reply: object) -> Start:
        """Return the start that ``hyperpod_barrier`` returned.

        Raises:
            ValueError: the reply is something else, or says too little.
        """
        env = worker_envs(reply, "job_start")
        return cls(int(env["JOB_RESTART_COUNT"]), int(env["RANK"]), int(env["WORLD_SIZE"]), env)

    @property
    def layout(self) -> tuple[int, int]:
        """The rank and the world size."""
        return self.rank, self.world_size


def worker_envs(reply: object, expected: str) -> dict[str, str]:
    """Return this rank's environment from a reply of the vendor's client.

    Args:
        reply: what ``hyperpod_barrier`` or ``hyperpod_wait_rank_info`` returned.
        expected: the kind of message that the reply has to be.

    Raises:
        ValueError: the reply is something else, or says too little.
    """
    if not isinstance(reply, tuple) or len(reply) != 2 or reply[0] != expected:
        raise ValueError(f"expected a {expected!r} message and got {str(reply)[:200]}")
    env = reply[1].get("worker_envs") if isinstance(reply[1], dict) else None
    if not isinstance(env, dict) or not all(isinstance(item, str) for pair in env.items() for item in pair):
        raise ValueError(f"{expected!r} has no worker_envs of texts")
    start = ("MASTER_PORT", "JOB_RESTART_COUNT") if expected == "job_start" else ()
    for name in ("RANK", "WORLD_SIZE", *start):
        if not env.get(name, "").lstrip("-").isdecimal():
            raise ValueError(f"{expected!r}: {name}={env.get(name)!r} is not a whole number")
    if expected == "job_start" and not 0 <= int(env["RANK"]) < int(env["WORLD_SIZE"]):
        raise ValueError(f"{expected!r}: RANK={env['RANK']} is not below WORLD_SIZE={env['WORLD_SIZE']}")
    return env
