"""Where per-sample gradients come from: our hooks, torch.func, BackPACK, Opacus; and the engine that streams them.

A source makes {name: [n, *shape]} of a loss (source.py); PrivateSum, StreamingEngine and RSDPOptimizer take any of it.
"""

from dprs_kernels.grads.backpack import BackpackSource
from dprs_kernels.grads.engine import Stream, StreamingEngine
from dprs_kernels.grads.functional import FunctionalSource
from dprs_kernels.grads.hooks import per_sample
from dprs_kernels.grads.opacus import OpacusSource
from dprs_kernels.grads.source import Source

__all__ = ["BackpackSource", "FunctionalSource", "OpacusSource", "Source", "Stream", "StreamingEngine", "per_sample"]
