"""Text from a model of Hugging Face transformers, tensor parallel, with tileweave.

    torchrun --nproc-per-node 2 examples/llama_inference.py meta-llama/Llama-3.1-8B-Instruct
    torchrun --nproc-per-node 2 examples/llama_inference.py   # tiny, random, also without a GPU

The two lines of tileweave are the import and ``enable()``.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import tileweave as tw
import tileweave.integrations.transformers as tileweave_transformers

PROMPT = "A matmul and the all-reduce that follows it"


def tiny_checkpoint() -> str:
    """A folder with a small random model, the same for all ranks of this run."""
    name = f"tileweave-tiny-llama-{os.environ['MASTER_PORT']}"
    folder = os.path.join(tempfile.gettempdir(), name)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    if os.environ["RANK"] == "0":
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def main() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    name = sys.argv[1] if len(sys.argv) > 1 else tiny_checkpoint()
    dist.barrier()
    tileweave_transformers.enable()
    model = AutoModelForCausalLM.from_pretrained(
        name,
        dtype="auto",
        distributed_config=DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto"),
    )
    tokenizer = AutoTokenizer.from_pretrained(name) if len(sys.argv) > 1 else None
    ids = torch.arange(3, 11)[None]
    if tokenizer is not None:
        ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    made = model.generate(ids.to(model.device), max_new_tokens=16, do_sample=False)
    if dist.get_rank() == 0:
        print(made[0].tolist() if tokenizer is None else tokenizer.decode(made[0]))
    tw.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
