"""One package per framework, and the private names that they need in `compat`."""
