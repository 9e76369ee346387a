"""Where per-sample gradients come from."""
