"""What this project knows of frameworks beyond their public interfaces: private names, options."""
