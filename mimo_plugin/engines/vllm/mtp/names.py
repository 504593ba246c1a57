# SPDX-License-Identifier: Apache-2.0
"""Names of the draft architectures and layers, readable without importing a model."""

ARCHITECTURE = "MimoPluginMTPModel"
OMNI_ARCHITECTURE = "MimoPluginOmniMTPModel"
REPLACES = {"MiMoV2MTPModel": ARCHITECTURE, "MiMoV2OmniMTPModel": OMNI_ARCHITECTURE}
"""vLLM's draft architectures and ours. Names of our own leave other engines' models alone."""

DRAFT_LAYERS = ".mtp.layers."
"""Part of the name of every attention layer of the draft, and of no other."""
