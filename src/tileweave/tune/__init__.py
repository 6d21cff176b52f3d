"""Measure the candidates of a problem, and keep what was fastest."""
