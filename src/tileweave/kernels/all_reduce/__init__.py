"""matmul_all_reduce: out[M, N] = sum over ranks of x[M, K/R] @ w[N, K/R].T. Read ``one_shot.py``
first.

``one_shot.py``: few rows, matmul and sum in one launch. ``collective.py``: reductions of
a finished product, in one launch that follows cuBLAS. ``norm.py``: RMSNorm of a result's rows.
"""
