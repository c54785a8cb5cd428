"""Trainings without a framework: loops of one's own, and the tensors of modules with optimizers of torch's kind."""
