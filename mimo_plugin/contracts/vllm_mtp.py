# SPDX-License-Identifier: Apache-2.0
"""vLLM symbols of configuration, models and worker that feature mtp relies on."""

from __future__ import annotations

from functools import partial

from mimo_plugin.contracts.row import Contract, call, class_, replaced

_MTP = ("mtp",)
_call = partial(call, features=_MTP)
_class = partial(class_, features=_MTP)

_SPEC = "config.speculative"
_DRAFT = "model_executor.models.mimo_v2_mtp"
_SPECULATOR = "v1.worker.gpu.spec_decode.speculator"
_MULTI = "v1.worker.gpu.spec_decode.multi_module_mtp.speculator"

_CONFIG_ROWS = (
    _class(
        "engine.arg_utils",
        "EngineArgs",
        "the number of draft tokens is filled in from the checkpoint",
        has="load_format model speculative_config",
    ),
    _class(
        _SPEC,
        "SpeculativeConfig",
        "what is drafted with which model",
        has="disable_eagle_block_drop draft_model_config enable_adaptive_verification "
        "max_model_len method num_speculative_tokens use_eagle use_multi_module_mtp",
    ),
    _class(
        "config.vllm",
        "VllmConfig",
        "the runner, and the look-ahead that follows from the number of layers",
        has="load_config num_prefill_lookahead_tokens speculative_config use_v2_model_runner",
    ),
    _class(
        "config.model",
        "ModelConfig",
        "target and draft: architecture, weights, length",
        has="architectures hf_config max_model_len model revision",
    ),
    _class(
        "config.parallel",
        "ParallelConfig",
        "prompts split over ranks can't be drafted for",
        has="prefill_context_parallel_size",
    ),
    _class("config.load", "LoadConfig", "weights that are made up", has="load_format"),
)

_MODEL_ROWS = (
    _class(
        _DRAFT,
        "MiMoV2MTP",
        "base of the draft class",
        has="compute_logits embed_input_ids forward load_weights",
    ),
    _call(
        _DRAFT,
        "MiMoV2MTP.forward",
        "the draft class runs the layer of a step",
        first="input_ids positions hidden_states intermediate_tensors inputs_embeds spec_step_idx",
        accepts="",
    ),
    _class(_DRAFT, "MiMoV2OmniMTP", "base of the multimodal draft class", base="MiMoV2MTP"),
    _class(
        _DRAFT,
        "MiMoV2MultiTokenPredictor",
        "base of the predictor with all layers",
        has="compute_logits embed_input_ids forward logits_processor num_mtp_layers",
    ),
    _call(
        _DRAFT,
        "MiMoV2MultiTokenPredictor.forward",
        "the predictor picks the layer of a step",
        first="input_ids positions previous_hidden_states inputs_embeds spec_step_idx",
        accepts="",
    ),
    _call(
        _DRAFT,
        "_MiMoV2MTPLayers.__init__",
        "builds the layers under the checkpoint's names",
        named="config num_mtp_layers cache_config quant_config prefix",
    ),
    _call(
        "model_executor.models.utils", "maybe_prefix", "names of parameters", first="prefix name"
    ),
    _class(
        "model_executor.layers.vocab_parallel_embedding",
        "VocabParallelEmbedding",
        "the draft's embedding, until the target's takes its place",
    ),
    _class(
        "model_executor.layers.vocab_parallel_embedding",
        "ParallelLMHead",
        "the draft's output head, until the target's takes its place",
    ),
    _class(
        "model_executor.layers.logits_processor", "LogitsProcessor", "logits of the draft layers"
    ),
    replaced(
        "model_executor.models", "ModelRegistry", "makes the draft class known", features=_MTP
    ),
    _call(
        "model_executor.models.registry",
        "_ModelRegistry.register_model",
        "makes the draft class known",
        first="model_arch model_cls",
    ),
)

_WORKER_ROWS = (
    _class(
        "config.compilation", "CUDAGraphMode", "whether a step replays a graph", has="FULL NONE"
    ),
    _class(
        _MULTI,
        "MultiModuleMTPSpeculator",
        "base of the speculator",
        base="DraftModelSpeculator",
        has="_generate_drafts _run_model cached_draft_input_embeds cached_draft_input_ids "
        "cached_target_hidden_states capture cudagraph_manager draft_input_id_overrides "
        "hidden_states init_cudagraph_manager inputs_embeds last_token_indices load_model propose",
    ),
    _call(
        _MULTI,
        "MultiModuleMTPSpeculator.propose",
        "drafts after each step",
        first="input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states "
        "num_sampled num_rejected last_sampled next_prefill_tokens temperature seeds "
        "dp_sync_state dummy_run skip_attn_for_dummy_run mm_inputs is_profile "
        "num_speculative_tokens",
        accepts="",
    ),
    _call(
        _MULTI,
        "MultiModuleMTPSpeculator._generate_drafts",
        "runs the layers and samples",
        first="num_reqs num_tokens attn_metadata slot_mappings num_tokens_across_dp "
        "cudagraph_runtime_mode",
    ),
    _call(
        _MULTI,
        "MultiModuleMTPSpeculator._run_model",
        "runs one layer",
        first="num_tokens attn_metadata slot_mappings num_tokens_across_dp spec_module_idx "
        "cudagraph_runtime_mode",
    ),
    _call(
        _MULTI,
        "pad_trailing_draft_slots",
        "rows behind the last known position write nothing",
        first="slot_mappings query_start_loc last_token_indices num_reqs",
    ),
    _call(
        _MULTI,
        "cache_inputs",
        "saves the inputs of the last rows for the next step",
        first="input_buffers draft_input_embeds draft_input_hidden_states cached_draft_input_ids "
        "cached_draft_input_embeds cached_target_hidden_states last_token_indices idx_mapping "
        "num_reqs num_speculative_steps use_input_embeds",
    ),
    _call(
        _MULTI,
        "update_draft_inputs",
        "moves the ids on by one for the next layer",
        first="draft_tokens draft_embeds input_buffers input_embeds last_token_indices idx_mapping "
        "num_reqs",
    ),
    _class(
        _SPECULATOR,
        "DraftModelSpeculator",
        "state and helpers of the speculator",
        has="_build_attn_metadata _copy_request_inputs _prepare_eplb_forward block_tables "
        "draft_max_seq_len draft_tokens dp_rank dp_size hidden_size idx_mapping input_buffers "
        "kv_cache_config max_model_len max_num_reqs max_num_tokens num_speculative_steps set_attn "
        "supports_mm_inputs",
    ),
    _call(
        _SPECULATOR,
        "DraftModelSpeculator._build_attn_metadata",
        "attention over the draft's own rows",
        first="num_reqs batch_desc query_start_loc_np seq_lens_cpu_upper_bound step",
        named="slot_mappings",
    ),
    _call(
        _SPECULATOR,
        "DraftModelSpeculator._copy_request_inputs",
        "temperature, seeds and slots of the requests",
        first="num_reqs idx_mapping temperature seeds dummy_run",
    ),
    _class(
        "v1.worker.gpu.input_batch",
        "InputBuffers",
        "buffers that hold the draft's wider rows",
        has="input_ids positions query_start_loc seq_lens",
    ),
    _call(
        "v1.worker.gpu.input_batch",
        "InputBuffers.__init__",
        "buffers that hold the draft's wider rows",
        first="max_num_reqs max_num_tokens device",
    ),
    _class(
        "v1.worker.gpu.input_batch",
        "InputBatch",
        "what the target computed in a step",
        has="decode_graph_eligible idx_mapping input_ids is_prefilling_np num_reqs num_tokens "
        "num_tokens_after_padding positions query_start_loc query_start_loc_np "
        "seq_lens_cpu_upper_bound",
    ),
    _class(
        "v1.worker.gpu.block_table",
        "BlockTables",
        "slots of the draft's rows",
        has="compute_slot_mappings slot_mappings",
    ),
    _call(
        "v1.worker.gpu.block_table",
        "BlockTables.compute_slot_mappings",
        "slots of the draft's rows",
        first="idx_mapping query_start_loc positions num_tokens_padded out",
    ),
    _call(
        "v1.worker.gpu.attn_utils",
        "build_slot_mappings_by_layer",
        "each layer gets the slots of its own group",
        first="slot_mappings kv_cache_config",
    ),
    _call(
        "v1.worker.gpu.dp_utils",
        "dispatch_cg_and_sync_dp",
        "picks a captured graph for the draft's rows",
        first="cudagraph_manager num_reqs num_tokens uniform_token_count dp_size dp_rank",
        named="need_eager dp_sync_state",
    ),
    _call(
        "v1.worker.utils",
        "get_uniform_decode_token_count",
        "whether all requests have as many rows",
        first="num_reqs num_tokens max_query_len decode_graph_eligible",
    ),
    _call(
        "utils.torch_utils",
        "async_tensor_h2d",
        "index arrays go to the device without waiting",
        first="data device",
    ),
    Contract(
        module="v1.attention.backends.utils",
        name="PAD_SLOT_ID",
        features=_MTP,
        why="rows that write nothing",
    ),
    *(
        _class(module, name, "gets its speculator once it has its runner", has="init_device")
        for module, name in (
            ("v1.worker.gpu_worker", "Worker"),
            ("v1.worker.cpu_worker", "CPUWorker"),
        )
    ),
    _class(
        "v1.worker.gpu.model_runner",
        "GPUModelRunner",
        "calls the speculator after each step",
        has="device speculator",
    ),
)

MTP_ROWS: tuple[Contract, ...] = (*_CONFIG_ROWS, *_MODEL_ROWS, *_WORKER_ROWS)
