"""The paper's own system on top of the library: networks, data readers, ScatterNet features, theory, recipes."""
