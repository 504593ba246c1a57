# SPDX-License-Identifier: Apache-2.0
"""From packed uint8 images and video frames to normalised patch rows."""
