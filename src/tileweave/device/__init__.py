"""Device functions: the extension of Triton and Gluon that the kernels are written in.

``triton/`` has each function in Triton, ``gluon/`` its counterpart for Hopper, ``interpreter/`` the
bodies that run without a GPU. Read ``triton/peers.py`` first, then ``triton/signal.py``. Memory
orders and inline assembly are nowhere else.
"""
