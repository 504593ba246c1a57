# SPDX-License-Identifier: Apache-2.0
"""vLLM symbols that the plugin relies on, one row each; a module per feature beside this one."""

from __future__ import annotations

from mimo_plugin.contracts.row import Contract, call, class_, replaced
from mimo_plugin.contracts.vllm_dp_affinity import DP_AFFINITY_ROWS
from mimo_plugin.contracts.vllm_kv import KV_ROWS
from mimo_plugin.contracts.vllm_media import MEDIA_ROWS
from mimo_plugin.contracts.vllm_mtp import MTP_ROWS
from mimo_plugin.contracts.vllm_mtp_sched import MTP_SCHED_ROWS
from mimo_plugin.contracts.vllm_mtp_transfer import MTP_TRANSFER_ROWS
from mimo_plugin.contracts.vllm_qwen import QWEN_ROWS
from mimo_plugin.contracts.vllm_sched import SCHED_ROWS
from mimo_plugin.contracts.vllm_tier_host import TIER_HOST_ROWS
from mimo_plugin.contracts.vllm_tier_store import TIER_STORE_ROWS
from mimo_plugin.contracts.vllm_tiers import TIERS_ROWS
from mimo_plugin.contracts.vllm_video import VIDEO_ROWS
from mimo_plugin.contracts.vllm_vision import VISION_ROWS

_ARGS = "engine.arg_utils"
_LOGGERS = "v1.metrics.loggers"

_SWITCH_ROWS = (
    Contract(
        module="plugins",
        name="DEFAULT_PLUGINS_GROUP",
        value="vllm.general_plugins",
        why="the entry-point group under which the plugin is installed",
    ),
    call("plugins", "load_general_plugins", "calls register_vllm()"),
    call(_ARGS, "EngineArgs.add_cli_args", "adds --plugin", first="parser"),
    call(_ARGS, "EngineArgs.from_cli_args", "reads --plugin", first="args"),
    call(
        _ARGS,
        "EngineArgs.create_engine_config",
        "validates the plugin's section and sets the scheduler",
        named="usage_context headless",
    ),
    class_(
        _ARGS,
        "EngineArgs",
        "carries the plugin's section",
        has="additional_config model block_size enable_prefix_caching",
    ),
    class_(
        _ARGS,
        "AsyncEngineArgs",
        "`vllm serve` builds its arguments from it",
        has="add_cli_args from_cli_args create_engine_config",
        base="EngineArgs",
    ),
    class_(
        "config.vllm",
        "VllmConfig",
        "where every process reads the plugin's section",
        has="additional_config attention_config cache_config device_config kv_transfer_config "
        "model_config parallel_config scheduler_config",
    ),
    class_(
        "config.scheduler",
        "SchedulerConfig",
        "scheduler_cls names the plugin's scheduler factory",
        has="scheduler_cls async_scheduling disable_hybrid_kv_cache_manager policy",
    ),
    call("config.scheduler", "SchedulerConfig.get_scheduler_cls", "resolves the factory"),
    class_(
        "config.cache",
        "CacheConfig",
        "sizes, and whether there is a prefix cache",
        has="block_size enable_prefix_caching",
    ),
    class_(
        "v1.metrics.stats",
        "SchedulerStats",
        "carries the plugin's counters from the engine core to the API process",
        has="kv_connector_stats",
    ),
    call(
        _LOGGERS,
        "StatLoggerManager.__init__",
        "puts the plugin's stat logger first",
        named="vllm_config engine_idxs custom_stat_loggers enable_default_loggers",
        closed=False,
    ),
    class_(
        _LOGGERS,
        "StatLoggerManager",
        "puts the plugin's stat logger first",
        has="engine_indexes stat_loggers record",
    ),
    call(
        _LOGGERS,
        "StatLoggerManager.record",
        "hands each step's statistics to the loggers",
        first="scheduler_stats iteration_stats",
    ),
    class_(
        _LOGGERS,
        "AggregateStatLoggerBase",
        "base of the plugin's stat logger",
        has="record log log_engine_initialized",
    ),
    call(
        _LOGGERS,
        "StatLoggerBase.record",
        "the plugin's stat logger takes its counters from it",
        first="scheduler_stats iteration_stats mm_cache_stats engine_idx",
        accepts="",
    ),
    class_(
        "config.model",
        "ModelConfig",
        "labels of the metrics; geometry, vocabulary and tokenizer",
        has="get_vocab_size hf_config hf_text_config served_model_name skip_tokenizer_init",
    ),
    class_(
        "config.parallel",
        "ParallelConfig",
        "worker_cls names the worker that says what is active",
        has="decode_context_parallel_size distributed_executor_backend worker_cls",
    ),
    replaced(
        "v1.worker.worker_base",
        "resolve_obj_by_qualname",
        "turns worker_cls into a class: the plugin's module answers with a subclass",
    ),
    call(
        "v1.worker.worker_base",
        "WorkerWrapperBase.init_worker",
        "resolves worker_cls and builds the worker",
        first="all_kwargs",
    ),
    *(
        call(
            module,
            name,
            "the worker says what is active before it starts",
            first="vllm_config local_rank rank",
            closed=False,
        )
        for module, name in (
            ("v1.worker.gpu_worker", "Worker.__init__"),
            ("v1.worker.cpu_worker", "CPUWorker.__init__"),
        )
    ),
    call(
        "v1.worker.worker_base",
        "WorkerBase.__init__",
        "the worker says what is active before it starts",
        first="vllm_config local_rank rank",
        closed=False,
    ),
)

VLLM_CONTRACTS: tuple[Contract, ...] = (
    *_SWITCH_ROWS,
    *KV_ROWS,
    *SCHED_ROWS,
    *MTP_ROWS,
    *MTP_SCHED_ROWS,
    *MTP_TRANSFER_ROWS,
    *VISION_ROWS,
    *QWEN_ROWS,
    *MEDIA_ROWS,
    *VIDEO_ROWS,
    *TIERS_ROWS,
    *TIER_HOST_ROWS,
    *TIER_STORE_ROWS,
    *DP_AFFINITY_ROWS,
)
"""Every row.  One without features concerns the plugin itself: the switch and the metrics."""
