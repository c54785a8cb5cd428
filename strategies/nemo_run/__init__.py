"""Recipes of NeMo-Run: switching recovery on in them, and what is refused."""
