"""Two networks that train against each other, each with an optimizer of its own: digits from noise.

    python -m recipes.mnist_gan                                 # one process
    python -m recipes.mnist_gan trainer.devices=2               # two DDP processes, the same run

Every step gives each optimizer one turn. The Trainer wraps each of the two networks on its own, so
there is nothing to detach from DDP and no search for unused parameters. What the generator draws
after every epoch is in `samples/` of the run's folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.image.fid import FrechetInceptionDistance

from recipes.mnist import Batch
from trainer import Callback, TaskModule, hydra_main, run
from trainer.run import Run


class MnistGan(TaskModule):
    """A small generator and its critic, with the non-saturating loss of Goodfellow et al. (2014).

    Source: "Generative Adversarial Nets", arXiv:1406.2661; the shapes of the networks follow
    Radford et al. (2015), arXiv:1511.06434, without BatchNorm, whose statistics would follow the
    size of a micro-batch.

    Args:
        learning_rate: Of both optimizers.
        noise_dim: Numbers that an image is made from.
        width: Channels of the last hidden layer of the generator, and the first of the critic.
    """

    def __init__(self, learning_rate: float = 0.0005, noise_dim: int = 64, width: int = 32) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.noise_dim = noise_dim
        self.generator = nn.Sequential(
            nn.Linear(noise_dim, 2 * width * 7 * 7),
            nn.Unflatten(1, (2 * width, 7, 7)),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, kernel_size=4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, kernel_size=4, stride=2, padding=1),
            nn.Sigmoid(),
        )
        self.critic = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, kernel_size=4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(2 * width * 7 * 7, 1),
        )

    def draw(self, count: int) -> Tensor:
        """Return ``count`` new images (n, 1, 28, 28), from 0 to 1."""
        images: Tensor = self.generator(torch.randn(count, self.noise_dim, device=self.run.device))
        return images

    def forward(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return what the critic makes of new images (n, 1), and in its own turn of real ones."""
        images = pixels(batch)
        drawn = self.draw(len(images))
        if self.run.turn == "generator":
            return {"drawn": self.critic(drawn)}
        return {"drawn": self.critic(drawn.detach()), "real": self.critic(images)}

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor | None:
        """Return how far the critic is from telling them apart, or the generator from fooling it.

        There is none outside training, where it is not clear whose it would be.
        """
        if self.run.split != "train":
            return None
        drawn = outputs["drawn"]
        if self.run.turn == "generator":
            return F.binary_cross_entropy_with_logits(drawn, torch.ones_like(drawn))
        real = outputs["real"]
        return (
            F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
            + F.binary_cross_entropy_with_logits(drawn, torch.zeros_like(drawn))
        ) / 2

    def configure_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Return one optimizer for each network; the critic's turn is the first."""
        networks = {"critic": self.critic, "generator": self.generator}
        return {
            name: torch.optim.Adam(network.parameters(), self.learning_rate, betas=(0.5, 0.999))
            for name, network in networks.items()
        }

    def build_metrics(self, split: str) -> Mapping[str, Metric]:
        """Return the distance between new and real images, outside training."""
        return {} if split == "train" else {"distance": FrechetInceptionDistance(Coarse())}

    def eval_forward(self, batch: Batch) -> Tensor:
        """Return as many new images as there are real ones."""
        return self.draw(len(batch[0]))

    def update_metrics(self, metrics: Mapping[str, Any], outputs: Any, batch: Batch) -> None:
        """Compare new images with the real ones."""
        if metrics:
            metrics["distance"].update(pixels(batch), real=True)
            metrics["distance"].update(outputs, real=False)


class Coarse(nn.Module):
    """What images are compared by: the brightness of 7 by 7 fields, as an Inception net is none.

    The Frechet distance of these is 0 for two equal distributions of images, and cheap.
    """

    num_features = 49

    def forward(self, images: Tensor) -> Tensor:
        """Return (n, 49) for images (n, 1, 28, 28)."""
        return F.avg_pool2d(images, 4).flatten(1)


class SaveSamples(Callback):
    """Writes what the generator draws from always the same noise after each validation.

    Args:
        rows: Of the picture; it has as many columns.
    """

    def __init__(self, rows: int = 8) -> None:
        self.rows = rows

    def on_validation_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Write ``samples/step-00000500.png``, say."""
        from matplotlib.image import imsave

        assert isinstance(run.task, MnistGan)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            images = run.task.draw(self.rows**2).cpu().view(self.rows, self.rows, 28, 28)
        path = run.run_dir / "samples" / f"step-{run.step:08d}.png"
        path.parent.mkdir(exist_ok=True)
        imsave(path, images.transpose(1, 2).reshape(28 * self.rows, -1).numpy(), cmap="gray")


def pixels(batch: Batch) -> Tensor:
    """Return the images of a batch as numbers from 0 to 1, (n, 1, 28, 28)."""
    images, _ = batch
    return images.unsqueeze(1).float() / 255


@hydra_main(config_path="../conf", config_name="mnist_gan")
def main(cfg: DictConfig) -> Any:
    """Do what the config says; return its ``optimized_metric``."""
    return run(cfg)


if __name__ == "__main__":
    main()
