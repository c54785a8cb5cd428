"""What a rank that lives through a fault keeps built: modules, DDP's buffers and optimizer, bound to new groups."""
