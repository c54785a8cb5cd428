"""The wheel and the sdist, as users get them."""
