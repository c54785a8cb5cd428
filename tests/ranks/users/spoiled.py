"""Run ``training.py`` with storage that fails, as ``CHECKPOINTLESS_TEST_SPOILS`` asks.

It imports nothing itself: Megatron's first checkpoint starts a process that loads the script once more.
"""

if __name__ == "__main__":
    from tests.ranks.users import training
    from tests.ranks.users.spoiler import Spoiler

    training.more_callbacks.append(Spoiler)
    training.main()
