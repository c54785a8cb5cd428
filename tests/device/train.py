"""Run a user's training, ``tests/ranks/users/training.py``, on the test device."""

if __name__ == "__main__":
    from tests.device import played

    played.install()

    from tests.ranks.users.training import main

    main()
