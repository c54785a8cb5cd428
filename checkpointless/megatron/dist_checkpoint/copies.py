"""The copies that a process keeps of what it writes to checkpoints: where they are, and which are kept.

They outlive trainers and generations: a block that is entered again finds them, as long as the process lives or
the place lasts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache

import torch.distributed as dist

from checkpointless.local_checkpoint.content import Content
from checkpointless.local_checkpoint.memory_storage import MemoryStorage
from checkpointless.local_checkpoint.part_id import SaveId
from checkpointless.local_checkpoint.part_storage import PartStorage
from checkpointless.megatron.dist_checkpoint.keeper import Keeper, Kept, Place


class Copies:
    """Keeps copies of this rank's share of the newest checkpoints, and of those of its peers.

    The copies of the newest whole checkpoint are kept, and those of checkpoints that are being written.

    Args:
        memory: whether to keep copies in the memory of the process.
        disk: a place that lasts longer than the process, such as a
            :class:`~checkpointless.local_checkpoint.disk_storage.DiskStorage`; None: there is none.
        replication_jump: the distance between ranks that keep copies for each other; 0: the number of ranks on a
            node, so that copies are on the next node.
        replication_factor: how many ranks keep each copy. 1: each rank keeps only its own.

    Raises:
        ValueError: a number is out of range.

    Attributes:
        places: where copies are kept, the first to be asked first.
    """

    def __init__(
        self,
        *,
        memory: bool = True,
        disk: PartStorage | None = None,
        replication_jump: int = 0,
        replication_factor: int = 1,
    ) -> None:
        if replication_jump < 0 or replication_factor < 1:
            raise ValueError(
                "replication_jump must be 0 or more and replication_factor 1 or more, "
                f"not {replication_jump} and {replication_factor}"
            )
        places = [Place("memory", MemoryStorage(takes_over=True), True)] if memory else []
        places += [Place("disk", disk, False)] if disk is not None else []
        self.places: tuple[Place, ...] = tuple(places)
        self.replication_jump, self.replication_factor = replication_jump, replication_factor
        self._keeper: Keeper | None = None
        self._kept_in: Callable[[], object] = lambda: None  # the default group of the keeper's generation
        self._whole: SaveId | None = None  # the newest that is on storage, too
        self._writing: set[SaveId] = set()  # that have not ended

    def prepare(self) -> Keeper:
        """Make what this generation needs to keep copies, unless that was done. Collective.

        Raises:
            ValueError: the ranks cannot be divided as replication wants it.
        """
        world = dist.group.WORLD
        if self._keeper is None or self._kept_in() is not world:
            if self._keeper is not None:
                self._keeper.leave()
            self._keeper = Keeper(self.places, self.replication_jump, self.replication_factor)
            self._kept_in = weakref.ref(world)  # a strong one would keep an old generation's communicators
        return self._keeper

    @property
    def can_exchange(self) -> bool:
        """Whether this rank can exchange parts with its peers now."""
        is_new = self._keeper is None or self._kept_in() is not dist.group.WORLD
        return is_new or (self._keeper is not None and self._keeper.can_exchange)

    def keep(self, save: SaveId, content: Content, exchanges: bool = True) -> Kept:
        """Begin a save: copy this rank's part to host memory, and have the copy kept in the background. Collective.

        All others but the newest whole one and those that are still being written are forgotten.

        Args:
            save: the save.
            content: this rank's part, with the live tensors.
            exchanges: whether all ranks can exchange parts.

        Raises:
            ValueError: the ranks cannot be divided as replication wants it.
        """
        keeper = self.prepare()
        self._writing.add(save)
        used = self._of_use()
        if self._whole is not None:
            keeper.forget_all_but(used)
        return keeper.keep(save, content, used, exchanges)

    def end(self, save: SaveId, is_whole: bool) -> None:
        """End a save, when its copies are where they belong.

        Args:
            save: the save.
            is_whole: whether all of the checkpoint is on storage. Otherwise its copies are of no use.
        """
        if self._keeper is not None:
            self._keeper.end(save)
        # Checkpoints end in their order, and their tokens begin with the time: what began before never ends.
        self._writing = {each for each in self._writing if each.token > save.token}
        if is_whole and (self._whole is None or self._whole.token < save.token):
            self._whole = save
        if self._keeper is not None and not is_whole:
            self._keeper.forget(save)
        elif self._keeper is not None:
            self._keeper.forget_all_but(self._of_use())

    def _of_use(self) -> set[SaveId]:
        return {*self._writing} if self._whole is None else {self._whole, *self._writing}

    def found(self, save: SaveId) -> None:
        """Note that training goes on from the checkpoint of ``save``: it is the newest whole one."""
        self._whole = save


@cache
def process_copies() -> Copies:
    """Return the copies of this process, in its memory alone, which strategies use if they are given none."""
    return Copies()
