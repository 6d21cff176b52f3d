"""Train a mixture-of-experts layer whose experts are sharded over ranks.

    torchrun --nproc-per-node 2 examples/moe_training.py   # also without a GPU

Each rank has tokens of its own. All gradients of the layer are complete after backward: nothing
is summed by hand, and one optimizer on every rank keeps router and experts right.
"""

import os
import time

import torch
import torch.distributed as dist

import tileweave as tw

HIDDEN, WIDTH, EXPERTS, TOP_K, TOKENS, STEPS = 64, 96, 8, 2, 32, 20


def main() -> None:
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    where = {"device": "cuda", "dtype": torch.bfloat16} if gpu else {}

    torch.manual_seed(0)  # the same on all ranks, since router and target are replicated
    moe = tw.nn.MoE(HIDDEN, WIDTH, EXPERTS, TOP_K, **where)
    target = torch.randn(HIDDEN, HIDDEN, **where) / HIDDEN**0.5
    optimizer = torch.optim.AdamW(moe.parameters(), lr=1e-2)

    torch.manual_seed(1 + rank)  # other tokens on each rank
    x = torch.randn(TOKENS, HIDDEN, **where)
    for step in range(STEPS):
        # the mean over the tokens of all ranks: a rank's share of it
        loss = (moe(x) - x @ target).float().square().mean() / world
        loss.backward()
        torch.nn.utils.clip_grad_norm_(moe.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    tw.close()
    dist.destroy_process_group()
    time.sleep(0.1)  # meanwhile gloo's threads drop their last tensors: at Python's exit they abort


if __name__ == "__main__":
    main()
