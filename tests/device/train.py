"""Run a user's training, ``tests/ranks/users/training.py``, on the test device."""

import sys

GRAPHS = "--graphs"  # a graph with a collective is replayed in every step

if __name__ == "__main__":
    from tests.device import played

    played.install()

    from tests.device.graphs import ReplaysGraph
    from tests.ranks.users import training

    if GRAPHS in sys.argv:
        sys.argv.remove(GRAPHS)
        training.more_callbacks.append(ReplaysGraph)
    training.main()
