"""The demo: it trains a small GPT on real text through faults, and proves that nothing was lost."""
