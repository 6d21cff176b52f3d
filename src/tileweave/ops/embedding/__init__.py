"""Operators of embedding tables: lookup and all-to-all, distribution of indices, gradients."""
