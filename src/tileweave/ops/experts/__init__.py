"""The operators of a mixture of experts: dispatch + grouped matmul, grouped matmul + combine, and
their routing plan."""
