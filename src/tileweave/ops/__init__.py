"""The operators as torch sees them.

``reference.py`` has the unfused form of every operator, ``core/`` the registration with torch.
``matmul/``, ``experts/`` and ``embedding/`` have two files per operator: OPERATOR.py with the
public function, the checks, the backward and the description of the operator (``core/spec.py``),
and OPERATOR_fused.py with the fused call.

This module lists the operators; everything else shows them in this order.
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
