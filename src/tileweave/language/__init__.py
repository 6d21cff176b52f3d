"""Device words: the extension of Triton and Gluon that the kernels are written in.

The only package with memory orders or inline assembly. ``signal`` (notify, wait, epochs), ``remote`` (peer addresses,
put, get), ``tile`` (integer maps), ``matmul`` (the main loop), ``hopper`` (the Gluon twins), ``trace`` (stamps).
Under ``TRITON_INTERPRET=1`` the same names have the bodies in ``interpreted``.
"""
