"""One run of the re-executable code block: what it is entered with, and how it ended."""
