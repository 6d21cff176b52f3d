"""Device words: the extension of Triton and Gluon that the kernels are written in.

The only package with inline assembly, and with memory orders between GPUs: kernels order programs of their own device at most.
``signal`` (notify, wait, epochs), ``meet`` (ranks that begin together), ``marked`` (data that announces itself), ``remote``
(peer addresses, put, get), ``tile`` (integer maps), ``matmul`` (the main loop), ``trace`` (stamps), ``hopper*`` (Gluon twins).
Under ``TRITON_INTERPRET=1`` most words of ``signal`` have the bodies in ``interpreted``.
"""
