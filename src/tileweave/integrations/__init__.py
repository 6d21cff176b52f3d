"""Adapters to frameworks: one module each, which replaces the framework's own layers by operators
of tileweave in one line of the user's.

==================  ==================================================================
module              the line
==================  ==================================================================
``transformers``    ``tileweave.integrations.transformers.enable()``
``torchtitan``      ``--override.imports tileweave.integrations.torchtitan.dist_gemm``
``megatron``        ``tileweave.integrations.megatron.get_gpt_layer_spec()``
``torchrec``        ``sharders=[tileweave.integrations.torchrec.Sharder()]``
``torchao``         ``tileweave.integrations.torchao.parallelize(model)``
``vllm``            ``TILEWEAVE_VLLM=1 vllm serve ...``
``sglang``          ``TILEWEAVE_SGLANG=1 python -m sglang.launch_server ...``
==================  ==================================================================

An adapter is the only module that imports its framework, and nothing imports it but its user:
tileweave itself depends on torch and triton only. The first four have extras of the package, such
as ``pip install tileweave[transformers]``, with the versions that were tested; torchao has none.
vLLM and SGLang find tileweave by an entry point; neither server has run with it on a GPU. Guides:
``docs/integrations/``.
"""
