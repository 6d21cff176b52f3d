"""Train a small DLRM: embedding tables sharded over ranks, the MLP replicated.

    torchrun --nproc-per-node 2 examples/dlrm_training.py   # also without a GPU

Each rank has samples of its own. The backward of the tables takes the step of row-wise Adagrad in
place; the MLP is an ordinary DistributedDataParallel module. ``dlrm.py`` is larger, and measures.
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import tileweave as tw

DIM, BATCH, POOLING, STEPS = 16, 32, 3, 20
ROWS = {"user": 400, "item": 1000, "query": 150, "page": 90}


def main() -> None:
    gpu = torch.cuda.is_available()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu"
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")

    torch.manual_seed(0)
    tables = [tw.TableSpec(name, rows, DIM, pooling=POOLING) for name, rows in ROWS.items()]
    options = {"optimizer": "adagrad", "learning_rate": 0.1, "divide_gradient": True}
    bags = tw.nn.ShardedEmbeddingBag(tables, device=device, **options)
    mlp = nn.Sequential(nn.Linear(len(ROWS) * DIM, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    mlp = nn.parallel.DistributedDataParallel(mlp)
    optimizer = torch.optim.Adagrad(mlp.parameters(), lr=0.05)

    torch.manual_seed(1 + dist.get_rank())  # other samples on each rank
    lengths = torch.full((len(ROWS) * BATCH,), POOLING, device=device)
    values = [torch.randint(rows, (BATCH * POOLING,), device=device) for rows in ROWS.values()]
    clicks = torch.randint(2, (BATCH,), device=device).float()
    for step in range(STEPS):
        pooled = bags(lengths, torch.cat(values))  # [BATCH, tables * DIM], own samples
        loss = binary_cross_entropy_with_logits(mlp(pooled).squeeze(1), clicks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_(), dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item() / dist.get_world_size():.4f}")
    tw.close()
    dist.destroy_process_group()
    time.sleep(0.1)  # meanwhile gloo's threads drop their last tensors: at Python's exit they abort


if __name__ == "__main__":
    main()
