# SPDX-License-Identifier: Apache-2.0
"""Names that several modules of the feature share."""

LOADER = "mimo"
"""Name of the loader in vLLM's registry, and in the metadata of its videos."""

SETUP_KEY = "mimo_setup"
"""Option of the loader, and key of the metadata, that says by which set-up a video is read."""

ROWS_KEY = "mimo_rows"
"""Key of the metadata of a video that comes as patch rows: ``source`` and ``target``, each height
and width of a frame in pixels."""

CONFIG_KEY = "mimo_plugin_video"
"""Attribute of the model's configuration that carries the feature's set-up to every process."""
