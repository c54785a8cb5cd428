"""Each folder is a benchmark, with its results; what they share is in `common.py`. None is installed."""
