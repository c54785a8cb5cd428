"""The report of a run as one web page that needs nothing else: no script, no font, no file, no network.

A template and a style sheet (Jinja2, which escapes all that comes from a run), and pictures whose places are
computed here as plain values. It knows the report and the events, and nothing of where they come from.
"""

from checkpointless.page.render import render

__all__ = ["render"]
