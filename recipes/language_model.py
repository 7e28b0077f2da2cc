"""A byte-level transformer that learns English from the Python documentation.

    python -m recipes.language_model                            # one process
    python -m recipes.language_model trainer.devices=2          # two DDP processes, the same run
    python -m recipes.language_model trainer.precision=bf16 trainer.gradient_clip_norm=0.5
    python -m recipes.language_model task.num_layers=6 task.dropout=0.2 trainer.max_epochs=20
    torchrun --nproc-per-node=2 -m recipes.language_model       # torchrun starts the processes

Every setting stands in `conf/language_model.yaml`. The text is the one that Python's own `help()`
shows (`pydoc_data.topics`), so there is nothing to download.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from trainer import DataModule, OptimizerSetup, TaskModule, WeightedLoss, hydra_main, run

VOCABULARY = 256
# Fills up the short windows of a batch; the loss leaves it out.
PADDING = -100


class Batch(NamedTuple):
    """Windows of text, the shorter ones padded at the end.

    Attributes:
        text: Bytes (n, 1 + the most to predict in one window), or `PADDING`.
        num_bytes: How many there are to predict; a number, so a GPU is not asked for it.
    """

    text: Tensor
    num_bytes: int


def collate(windows: list[Tensor]) -> Batch:
    """Make a batch of windows, which differ in length."""
    text = pad_sequence(windows, batch_first=True, padding_value=PADDING)
    return Batch(text, num_bytes=sum(len(window) - 1 for window in windows))


class Windows(Dataset[Tensor]):
    """Documents cut into windows with ``length`` bytes to predict; a document's last is shorter."""

    def __init__(self, documents: Sequence[bytes], length: int) -> None:
        self.windows = [
            torch.tensor(list(text[start : start + length + 1]))
            for text in documents
            for start in range(0, len(text) - 1, length)
        ]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index]


class PythonTopics(DataModule):
    """The help topics of the running Python; the last of them are held out for validation.

    Args:
        context: Bytes of a window, and so the most that a prediction looks back.
        val_share: The share of the bytes, in whole documents, that is held out.
    """

    collate_fn = staticmethod(collate)

    def __init__(self, context: int = 128, val_share: float = 0.1) -> None:
        documents = read_topics()
        held_out, num_val = 0, 0
        while held_out < val_share * sum(map(len, documents)):
            num_val += 1
            held_out += len(documents[-num_val])
        self.train = Windows(documents[:-num_val], context)
        self.val = Windows(documents[-num_val:], context)

    def train_dataset(self) -> Windows:
        """Return the windows of the first documents."""
        return self.train

    def val_dataset(self) -> Windows:
        """Return the windows of the documents that are held out."""
        return self.val


class Block(nn.Module):
    """Causal self-attention, then a two-layer network, each added to what comes in."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next layer's input (n, length, width)."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.projection(mixed.transpose(1, 2).flatten(2)))
        added: Tensor = self.dropout(self.mlp(x))
        return x + added


class ByteTransformer(TaskModule):
    """Predicts each byte from the ones before it.

    The loss is a `WeightedLoss` by bytes: windows differ in length, and every *byte* of the global
    batch counts the same, however its windows fall on micro-batches and ranks.

    Args:
        learning_rate: At the end of the warm-up.
        weight_decay: Of AdamW.
        warmup: The share of the run in which the rate rises; it then falls along a cosine.
        context: The longest window; as in `PythonTopics`.
        width: Features per byte.
        num_layers: Transformer blocks.
        num_heads: Attention heads per block.
        dropout: Of each block's two outputs.
    """

    def __init__(
        self,
        learning_rate: float = 0.004,
        weight_decay: float = 0.1,
        warmup: float = 0.1,
        context: int = 128,
        width: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup = warmup
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads, dropout) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        for table in (self.embedding, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits (n, length, 256) of every byte after a window's first."""
        # Padding is at the end, where nothing that counts looks; it only needs a valid index.
        seen = batch.text[:, :-1].clamp(min=0)
        places = torch.arange(seen.shape[1], device=seen.device)
        hidden = self.blocks(self.embedding(seen) + self.position(places))
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def loss(self, outputs: Tensor, batch: Batch) -> WeightedLoss:
        """Return the cross-entropy in nats, and log it in bits, per byte."""
        targets = batch.text[:, 1:]
        total = F.cross_entropy(
            outputs.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum"
        )
        bits_per_byte = total.detach() / (batch.num_bytes * math.log(2))
        self.log("bits_per_byte", bits_per_byte, weight=batch.num_bytes)
        return WeightedLoss(total, batch.num_bytes)

    def configure_optimizers(self) -> OptimizerSetup:
        """Return AdamW, with warm-up and cosine decay where the run's length is known."""
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay, fused=True
        )
        total = self.run.total_steps
        if not total:
            return OptimizerSetup(optimizer)
        rising = max(1, round(self.warmup * total))

        def factor(step: int) -> float:
            if step < rising:
                return (step + 1) / rising
            return (1 + math.cos(math.pi * min(1.0, (step - rising) / max(1, total - rising)))) / 2

        return OptimizerSetup(optimizer, LambdaLR(optimizer, factor))


def read_topics() -> list[bytes]:
    """Return every help topic once, in the order of their names."""
    return [text.encode() for text in dict.fromkeys(topics[name] for name in sorted(topics))]


@hydra_main(config_path="../conf", config_name="language_model")
def main(cfg: DictConfig) -> Any:
    """Do what the config says; return its ``optimized_metric``."""
    return run(cfg)


if __name__ == "__main__":
    main()
