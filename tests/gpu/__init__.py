"""The suite for whoever has a GPU, ``make gpu``: what it runs, in which processes, and what it writes down.

Nothing here needs NeMo or a network. What is asked of a device runs in a process that is ended when its time is
over, so that a test that hangs costs its own bound and no more.
"""
