# SPDX-License-Identifier: Apache-2.0
"""Is the shared embedding cache asked for? Nothing of the engine is imported to say so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONNECTOR = "MimoSharedECConnector"
"""What ``ec_connector`` says to ask for it."""

MODULE = "mimo_plugin.engines.vllm.ec_shared"


def is_ours(transfer: Any) -> bool:
    """Whether an ``ECTransferConfig``, or what will become one, asks for our connector."""
    if isinstance(transfer, Mapping):
        name, module = transfer.get("ec_connector"), transfer.get("ec_connector_module_path")
    else:
        name = getattr(transfer, "ec_connector", None)
        module = getattr(transfer, "ec_connector_module_path", None)
    return name == CONNECTOR and module in (None, MODULE)


def complete(engine_args: Any) -> None:
    """Say in the engine's arguments where our connector is found, so that its name is enough."""
    transfer = engine_args.ec_transfer_config
    if isinstance(transfer, Mapping):
        engine_args.ec_transfer_config = {**transfer, "ec_connector_module_path": MODULE}
    else:
        transfer.ec_connector_module_path = MODULE
