"""What a rank holds that no replica has: its buffers, its random streams, and their copies on other nodes."""
