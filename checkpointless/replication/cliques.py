"""Which ranks keep whose parts: pure functions of plain values.

The ranks of a job form cliques. The members of a clique are in different failure domains (nodes), and each of them
keeps what the others save.
"""

from __future__ import annotations


def clique_of(rank: int, world_size: int, jump: int, factor: int) -> tuple[int, ...]:
    """Return the ranks that keep each other's parts, ``rank`` among them, in ascending order.

    With J the jump and F the factor, cliques are ``n, n + J, ..., n + (F - 1) J`` for ``n = a J F + b``, with a
    from 0 to W / (J F) - 1 and b from 0 to J - 1 (the layout in the documentation of NVIDIA's
    nvidia-resiliency-ext).

    Args:
        rank: a rank of the world.
        world_size: W, the number of ranks of the job; a multiple of J * F.
        jump: J, at least 1: the distance between two members. If J is the size of a node, no two members are on the
            same node.
        factor: F, at least 1: the number of members of a clique.

    Raises:
        ValueError: the world cannot be divided that way.
    """
    check_layout(world_size, jump, factor)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of the {world_size} ranks")
    block, within = divmod(rank, jump * factor)
    first = block * jump * factor + within % jump
    return tuple(range(first, first + jump * factor, jump))


def all_cliques(world_size: int, jump: int, factor: int) -> list[tuple[int, ...]]:
    """Return all cliques, each once, by their first ranks; see :func:`clique_of`."""
    cliques = (clique_of(rank, world_size, jump, factor) for rank in range(world_size))
    return list(dict.fromkeys(cliques))


def check_layout(world_size: int, jump: int, factor: int) -> None:
    """Check that ``world_size`` ranks can be divided into cliques of ``factor`` ranks that are ``jump`` apart.

    Raises:
        ValueError: they cannot be divided; the message says what would be possible.
    """
    if jump < 1 or factor < 1:
        raise ValueError(f"replication_jump and replication_factor must be positive, not {jump} and {factor}")
    if world_size % (jump * factor):
        raise ValueError(
            f"{world_size} ranks cannot be divided into cliques of {factor} ranks that are {jump} apart: the world "
            f"size must be a multiple of replication_jump * replication_factor = {jump * factor}. On a single node "
            "give replication_jump=1, which protects against the loss of files but not of the node"
        )
