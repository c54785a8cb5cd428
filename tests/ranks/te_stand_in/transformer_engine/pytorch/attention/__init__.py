"""Stands for attention."""
