"""Device functions in Gluon for Hopper: the counterparts of ``device/triton``, and the
warp-specialised main loop (``matmul.py``)."""
