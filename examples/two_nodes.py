"""A tensor-parallel MLP over two nodes, forward and backward, compared with the same MLP on one
device.

    python examples/two_nodes.py               # one host: 2 emulated nodes of 2 ranks
    torchrun --nnodes 2 --nproc-per-node 4 ... examples/two_nodes.py    # two hosts

Rank r has a part of the rows of x and of the width of the MLP. On one host ``launch(nodes=2)``
gives ranks two ``NCCL_HOSTID``s, so that ranks of different nodes share no memory. Under torchrun
the hosts are the nodes.

    x [m, H] -- gather, matmul by w1 [W/R, H] -- relu -- matmul by w2 [H, W/R], scatter -- z [m, H]
"""

import argparse

import torch

import tileweave as tw
from tileweave.bench.subjects import worst
from tileweave.launcher import (
    Member,
    default_device_type,
    default_world_size,
    end_with,
    given_world_size,
    launch,
)

# hidden size, and rows and width of a rank; on GPUs enough to be cut into chunks
SIZES = {"cpu": (64, 64, 48), "cuda": (4096, 2048, 8192)}
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 3e-2}  # relative, of the largest element


def draw(*shape: int, seed: int) -> torch.Tensor:
    """The same numbers on every rank and every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mlp(member: Member) -> list[str]:
    rank, size = member.rank, member.world_size
    hidden_size, rows, width = SIZES[member.device.type]
    dtype = torch.bfloat16 if member.on_gpu else torch.float32
    whole = [
        draw(size * rows, hidden_size, seed=0),
        draw(size * width, hidden_size, seed=1) / hidden_size**0.5,
        draw(hidden_size, size * width, seed=2) / (size * width) ** 0.5,
    ]
    whole = [each.to(member.device, dtype).requires_grad_() for each in whole]
    parts = [each.detach().chunk(size, at)[rank] for each, at in zip(whole, (0, 0, 1), strict=True)]
    x, w1, w2 = (each.contiguous().requires_grad_() for each in parts)

    z = tw.matmul_reduce_scatter(torch.relu(tw.all_gather_matmul(x, w1)), w2)
    z.square().sum().backward()
    expected = torch.relu(whole[0] @ whole[1].t()) @ whole[2].t()
    expected.square().sum().backward()

    hidden = x.new_empty(size * rows, width)
    calls = {"all_gather_matmul": (x, w1), "matmul_reduce_scatter": (hidden, w2)}
    said = [f"{op}: {tw.explain(op, *operands).summary}" for op, operands in calls.items()]
    found = {
        "z": (z, expected, 0),
        "gradient of x": (x.grad, whole[0].grad, 0),
        "gradient of w1": (w1.grad, whole[1].grad, 0),
        "gradient of w2": (w2.grad, whole[2].grad, 1),
    }
    for name, (got, want, dim) in found.items():
        assert got is not None and want is not None
        mine = want.chunk(size, dim)[rank].float()
        error = ((got.float() - mine).abs().max() / want.float().abs().max()).item()
        error = worst(error, member.device, member.group)
        verdict = "right" if error <= ALLOWED[dtype] else "WRONG"
        said.append(f"{name}: differs by {error:.1e}, {verdict}")
    tw.close()
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description="A tensor-parallel MLP over two nodes.")
    parser.add_argument("--ranks", type=int, help="on one host: how many, an even number")
    device_type = default_device_type()
    size = default_world_size(device_type, parser.parse_args().ranks)
    nodes = 2 if given_world_size() is None else 1
    said = launch(mlp, world_size=size, device_type=device_type, nodes=nodes) or []
    print("\n".join(said))
    return int(any("WRONG" in line for line in said))


if __name__ == "__main__":
    end_with(main)
