# SPDX-License-Identifier: Apache-2.0
"""Feature ``vision``: pixels travel as bytes, the model's inputs are made beside the model."""
