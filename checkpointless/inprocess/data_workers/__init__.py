"""The worker processes of data loaders: their end, their sockets and their random streams."""
