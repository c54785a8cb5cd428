"""A trainer's data: where its loaders stand, and how loaders that are made anew are brought there."""
