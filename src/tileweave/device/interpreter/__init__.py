"""Device functions under Triton's interpreter: bodies in plain Python (``words.py``), and a faster interpreter (``speedups.py``)."""
