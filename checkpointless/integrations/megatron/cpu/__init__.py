"""What the CPU platform replaces, one module for each library and subject; `cpu_platform` installs it."""
