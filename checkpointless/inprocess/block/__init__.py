"""One run of the re-executable code block: its arguments, random streams and signal handlers, and how it ended."""
