"""A generation's connections between ranks: how a blocked rank is freed from them, and where they end."""
