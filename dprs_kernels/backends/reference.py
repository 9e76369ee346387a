"""The specification as a backend: runs on every device, correct and slow."""

from __future__ import annotations

import torch

from dprs_kernels.reference import accumulate_, release

__all__ = ["accumulate_", "release", "unavailable"]


def unavailable(device: torch.device) -> str:
    return ""
