"""Differentially private SGD with random sparsification, as one fused pass over per-sample gradients."""

from dprs_kernels.grads import StreamingEngine, per_sample
from dprs_kernels.mask import KeepMask
from dprs_kernels.noise import NoiseSource
from dprs_kernels.optimizer import RSDPOptimizer
from dprs_kernels.schedule import ConstantRate, CustomRate, GradualCooling
from dprs_kernels.step import NonPrivateDiagnostics, PrivateSum, fused_rs_dp_step
from dprs_kernels.version import __version__

__all__ = [
    "ConstantRate",
    "CustomRate",
    "GradualCooling",
    "KeepMask",
    "NoiseSource",
    "NonPrivateDiagnostics",
    "PrivateSum",
    "RSDPOptimizer",
    "StreamingEngine",
    "__version__",
    "fused_rs_dp_step",
    "per_sample",
]
