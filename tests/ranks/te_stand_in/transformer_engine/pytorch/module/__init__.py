"""Stands for the modules with parameters."""
