"""Names that files without torch need too: tables, pictures and comparisons start at once."""

LIMIT = "read G once (limit)"
OURS = "dprs_kernels"
