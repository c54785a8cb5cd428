"""A trainer's data: where its loaders stand, and how loaders that are rebuilt are brought there."""
