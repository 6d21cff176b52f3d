"""matmul_reduce_scatter: out[M/R, N] = rows of this rank of the sum over ranks of x[M, K/R] @
w[N, K/R].T. Read ``triton.py`` first.

``triton.py`` has the protocol and the portable kernel; ``hopper.py`` has the same protocol
warp-specialised, with its epilogue in ``hopper_epilogue.py``.
"""
