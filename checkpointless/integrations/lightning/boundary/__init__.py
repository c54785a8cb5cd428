"""The boundary of a step: which point after a step it is, what is taken there, and how the loops resume there.

``step_keeper`` gives the journal of a fit what the trainer has at every point, with ``epoch_metrics``, and puts it
back after a fault while Lightning's ``loops`` resume. How a framework makes a step and replays one, its strategy
says (``Steps``).
"""
