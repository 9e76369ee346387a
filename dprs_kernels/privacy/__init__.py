"""What makes a run private beyond one step: who is sampled (sampling) and what it costs (accounting)."""
