"""Test what ends a run before it begins, and what its metrics are told."""
