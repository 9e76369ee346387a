"""What makes a run private beyond one step: who is sampled, what it costs, what was released, how it goes on after a
crash, and whether a step does what it says (audit). SECURITY.md has the claims and the test of each."""

from dprs_kernels.privacy.accounting import calibrate, epsilon
from dprs_kernels.privacy.checkpoint import TrainingState
from dprs_kernels.privacy.ledger import Ledger
from dprs_kernels.privacy.sampling import PoissonBatchSampler, empty_safe_collate

__all__ = ["Ledger", "PoissonBatchSampler", "TrainingState", "calibrate", "empty_safe_collate", "epsilon"]
