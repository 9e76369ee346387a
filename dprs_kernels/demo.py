"""The demo: a private training run on real data, with random sparsification, in seconds.

1797 handwritten digits of 8x8 pixels (they ship inside scikit-learn), a tanh network of 4810 parameters. `run` is
the whole loop; everything in it that touches a training image goes through fused_rs_dp_step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from dprs_kernels import GradualCooling, KeepMask, NoiseSource, backends, fused_rs_dp_step
from dprs_kernels.layout import Layout
from dprs_kernels.plan import make_plan
from dprs_kernels.privacy.accounting import calibrate
from dprs_kernels.privacy.accounting import epsilon as epsilon_of
from dprs_kernels.privacy.sampling import poisson_indices

# Public constants. Under add/remove adjacency the number of training images is not public, so neither the divisor
# nor delta is computed from it.
SAMPLE_RATE = 0.2
STEPS_PER_EPOCH = 5            # 1 / SAMPLE_RATE
EXPECTED_BATCH_SIZE = 288
MAX_GRAD_NORM = 1.0
LEARNING_RATE = 3.0
DELTA = 1e-4
TEST_IMAGES = 360
NOT_COVERED = "choosing these settings, further runs, and the test images, which the accuracy is measured on"


@dataclass(frozen=True)
class DemoResult:
    """What a run may publish. Training losses, norms and batch sizes are private and not here."""

    accuracy: float            # on the held-out images
    epsilon: float             # of the steps taken
    delta: float
    noise_multiplier: float    # sigma
    steps: int
    sample_rate: float
    final_rate: float
    backend: str
    key_id: str
    accountant: str = "rdp"
    sampler: str = "Poisson with secret bits"
    adjacency: str = "add/remove"

    def summary(self) -> str:
        return (
            f"test accuracy  {self.accuracy:.1%} of {TEST_IMAGES} held-out images\n"
            f"privacy        epsilon {self.epsilon:.3f} at delta {self.delta:g}, adjacency {self.adjacency}\n"
            f"accounting     {self.accountant}, sampler {self.sampler} (q = {self.sample_rate:g}), "
            f"sigma {self.noise_multiplier:.3f}, {self.steps} steps\n"
            f"sparsified     0 to {self.final_rate:.0%} of coordinates dropped\n"
            f"computed by    backend {self.backend}, noise key {self.key_id}\n"
            f"not covered    {NOT_COVERED}"
        )


def run(
    *,
    epochs: int = 30,
    epsilon: float = 3.0,
    final_rate: float = 0.9,
    seed: int = 0,
    progress: bool = True,
    backend: str = "auto",
) -> DemoResult:
    """Trains with at most `epsilon` at delta 1e-4. `seed` decides what is public: the split into training and test
    images, the initial weights, the masks. Noise and sampling are secret, so two runs differ."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed: got {seed!r}; expected an integer in [0, 2^63)")
    schedule = GradualCooling(final_rate=final_rate, epochs=epochs)
    used = backends.resolve(backend, torch.device("cpu")).__name__.rpartition(".")[2]
    (images, labels), (test_images, test_labels) = load_digits(seed)
    model = make_model(seed)
    params = list(model.named_parameters())
    grad_samples_of = per_sample_gradients(model)
    sigma, ratio = sigma_and_ratio(params, epsilon, epochs * STEPS_PER_EPOCH)
    noise = NoiseSource()   # fresh 256-bit key from the OS
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def spent() -> float:
        return epsilon_of(
            noise_multiplier=sigma, sample_rate=SAMPLE_RATE, steps=noise.step, delta=DELTA, sensitivity_ratio=ratio
        )

    bar = progress_bar(epochs, progress)
    for epoch in bar:
        keep = KeepMask.draw(params, drop_rate=schedule(epoch), seed=seed, draw=epoch)
        for _ in range(STEPS_PER_EPOCH):
            batch = poisson_indices(len(images), SAMPLE_RATE)
            fused_rs_dp_step(
                params, keep=keep, max_grad_norm=MAX_GRAD_NORM, noise_multiplier=sigma,
                expected_batch_size=EXPECTED_BATCH_SIZE, noise=noise,
                grad_samples=grad_samples_of(images[batch], labels[batch]), backend=used,
            )   # fmt: skip
            optimizer.step()
        accuracy = accuracy_of(model, test_images, test_labels)
        bar.set_postfix(drop=f"{schedule(epoch):.2f}", test=f"{accuracy:.1%}", epsilon=f"{spent():.2f}")
    return DemoResult(
        accuracy=accuracy, epsilon=spent(), delta=DELTA, noise_multiplier=sigma, steps=noise.step,
        sample_rate=SAMPLE_RATE, final_rate=schedule.final_rate, backend=used, key_id=noise.key_id,
    )   # fmt: skip


def per_sample_gradients(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]:
    """A function (images [N, 64], labels [N]) -> {name: [N, *shape]}; N = 0 gives zero rows."""

    def loss(params: dict[str, torch.Tensor], image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(model, params, (image,)), label)

    each = vmap(grad(loss), in_dims=(None, 0, 0))

    def gradients(images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        params = {name: param.detach() for name, param in model.named_parameters()}
        if len(images) == 0:   # under vmap some layers fail on no samples; the step is taken, with noise alone
            return {name: param.new_zeros(0, *param.shape) for name, param in params.items()}
        gradients: dict[str, torch.Tensor] = each(params, images, labels)
        return gradients

    return gradients


def sigma_and_ratio(params: list[tuple[str, nn.Parameter]], target_epsilon: float, steps: int) -> tuple[float, float]:
    """The smallest sigma that meets the target with the grid's extra sensitivity charged, and that charge as a ratio
    to C. The grid grows with sigma, hence the loop; it ends after two or three rounds."""
    layout, ratio = Layout.of(params), 1.0
    while True:
        sigma = calibrate(
            target_epsilon=target_epsilon, target_delta=DELTA, sample_rate=SAMPLE_RATE, steps=steps,
            sensitivity_ratio=ratio,
        )   # fmt: skip
        plan = make_plan(
            layout, max_grad_norm=MAX_GRAD_NORM, noise_multiplier=sigma, expected_batch_size=EXPECTED_BATCH_SIZE
        )
        needed = plan.sensitivity(layout.size) / MAX_GRAD_NORM   # all kept: the most that any epoch needs
        if needed <= ratio:
            return sigma, ratio
        ratio = needed


def make_model(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)   # initial weights only, and public
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def load_digits(seed: int) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """(training images [N, 64] in [0, 1], labels [N]), (test images, labels), split by a public seed."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise ImportError(f'the demo needs scikit-learn ({error}): pip install "dprs_kernels[train]"') from error
    data = load()
    images = torch.from_numpy(data.data / 16.0).float()   # by the known range, not by the data's statistics
    labels = torch.from_numpy(data.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return (images[train], labels[train]), (images[test], labels[test])


@torch.no_grad()
def accuracy_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float((model(images).argmax(1) == labels).double().mean())


def progress_bar(epochs: int, show: bool) -> Any:
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(f'the demo needs tqdm ({error}): pip install "dprs_kernels[train]"') from error
    return tqdm(range(epochs), desc="epochs", unit="epoch", disable=not show)
