"""Standbys: processes that have imported what a rank needs and wait for one to be started (``--warm-spares N``)."""
