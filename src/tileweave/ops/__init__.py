"""What torch sees: the reference of every operator (``reference.py``), registration (``core/``),
and one file per operator.

``matmul/`` | ``experts/`` | ``embedding/``: OPERATOR.py has the public function, checks and
backward; OPERATOR_fused.py the fused call.
"""
