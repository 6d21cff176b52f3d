"""What torch sees: the reference of every operator (``reference.py``), registration (``core/``),
and one file per operator.

``matmul/`` | ``experts/`` | ``embedding/``: OPERATOR.py has the public function, checks, backward
and the description of the operator (``core/spec.py``); OPERATOR_fused.py the fused call.

This is the one place that lists the operators: in the order in which everything shows them.
"""

from tileweave.ops.core.registration import register
from tileweave.ops.embedding import bag_all_to_all
from tileweave.ops.experts import dispatch_grouped_matmul, grouped_matmul_combine
from tileweave.ops.matmul import (
    all_gather_matmul,
    all_to_all_matmul,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
)

for _operator in (
    all_gather_matmul,
    matmul_reduce_scatter,
    matmul_all_reduce,
    matmul_all_to_all,
    all_to_all_matmul,
    dispatch_grouped_matmul,
    grouped_matmul_combine,
    bag_all_to_all,
):
    register(_operator.SPEC)
