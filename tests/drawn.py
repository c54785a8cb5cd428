"""How many inputs a test draws: few per commit; ``--hypothesis-profile nightly`` draws more, ``quick`` fewer."""

from hypothesis import settings

_EACH = 100  # what hypothesis draws by default


def examples(count: int) -> settings:
    """Return settings with ``count`` examples per commit, or more as the loaded profile draws more than usual."""
    return settings(max_examples=count * settings().max_examples // _EACH)
