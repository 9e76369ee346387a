"""The GPU kernels: @triton.jit only. Launch geometry, tables and checks are in backends/triton.py.

One stem names the same thing as in reference.py and csrc/: vectors, norms, sums, rng, noise, mask, one_pass, linear.
Private functions named `_..._kernel` are launched; the others are device functions shared between kernels.

Triton reads TRITON_INTERPRET when it decorates: whoever wants the interpreter sets it before this package is
imported. A process either interprets or compiles.
"""
