"""LoRA on a tensor-parallel Llama of Hugging Face transformers and PEFT, with tileweave.

    torchrun --nproc-per-node 2 examples/llama_lora.py   # tiny, random, also without a GPU

PEFT shards its own layers with the styles that ``enable()`` replaced, so call that before both.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import tileweave as tw
import tileweave.integrations.transformers as tileweave_transformers

STEPS = 10


def main() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = os.path.join(tempfile.gettempdir(), f"tileweave-tiny-lora-{os.environ['MASTER_PORT']}")
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    if rank == 0:
        config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
        LlamaForCausalLM(config).save_pretrained(folder)
    dist.barrier()

    tileweave_transformers.enable()
    model = LlamaForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=size, tp_plan="auto")
    )
    torch.manual_seed(0)  # PEFT draws the replicated halves of its matrices on each rank
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "o_proj", "down_proj"]))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    ids = torch.arange(64).view(2, 32).to(model.device) + 3
    for step in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    tw.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
