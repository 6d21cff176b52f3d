"""The matmul operators with a collective before or after: all-gather, reduce-scatter, all-reduce,
all-to-all."""
