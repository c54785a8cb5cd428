"""The report of a run as one web page that needs nothing else: no script, no font, no file, no network.

The page consists of a Jinja2 template, which escapes all text that comes from a run, a style sheet, and pictures
whose positions are computed here as plain values. The package knows the report and the events, but not where they
come from.
"""

from checkpointless.report.page.render import render

__all__ = ["render"]
