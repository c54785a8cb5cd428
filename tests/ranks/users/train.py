"""Run ``training.py`` as a script.

    checkpointless run --cpu --nproc-per-node 4 tests/ranks/users/train.py --steps 6 --features ema,earlystop

It imports nothing itself: Megatron's first checkpoint starts a process that loads the script once more.
"""

if __name__ == "__main__":
    from tests.ranks.users.training import main

    main()
