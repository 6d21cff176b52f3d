"""The operators of embedding tables: pooled lookup + all-to-all, redistribution of jagged indices,
gradients of tables."""
