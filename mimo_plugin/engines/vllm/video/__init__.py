# SPDX-License-Identifier: Apache-2.0
"""Feature ``video``: a loader that decodes only the frames that are taken."""
