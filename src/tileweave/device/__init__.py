"""Device functions: the extension of Triton and Gluon that the kernels are written in.

``triton/`` has each function in Triton, ``gluon/`` its counterpart for Hopper, ``interpreter/`` the bodies that run without a GPU.
Read ``triton/signal.py`` first. Memory orders and inline assembly are nowhere else.
"""
