# SPDX-License-Identifier: Apache-2.0
"""Lets torchvision's Python part be imported beside a CPU torch.

``tools/setup_vllm.py`` copies this file into a CPU environment, where each process loads it first.

torchvision describes two operators to torch when it is imported. Its native library declares them,
and that library is a CUDA build. Declared here, they can be described; nothing can call them.
"""

from __future__ import annotations

import sys
from typing import Any

SCHEMAS = (
    ("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"),
    ("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"),
)


class Declarer:
    """A finder that finds nothing: it declares the operators when torchvision is looked for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Declare on the first look for torchvision; never find a module."""
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator, schema in SCHEMAS:
                space, _, short = operator.partition("::")
                if not hasattr(getattr(torch.ops, space), short):
                    torch.library.define(operator, schema)


sys.meta_path.insert(0, Declarer())
