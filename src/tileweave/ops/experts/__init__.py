"""Operators of a mixture of experts, and their routing plan."""
