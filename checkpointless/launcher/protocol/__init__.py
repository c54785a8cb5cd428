"""What travels between ranks, agents and the coordinator: messages, causes and states, and the ways they travel."""
