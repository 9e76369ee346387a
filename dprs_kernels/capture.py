"""CUDA graphs: is one being captured now? Then Python runs once and the graph many times."""

from __future__ import annotations

import torch


def capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
