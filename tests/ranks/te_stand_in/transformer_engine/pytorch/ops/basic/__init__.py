"""Stands for single operations."""
