"""Ways of making several ranks train one model."""

from trainer.strategies.base import Strategy
from trainer.strategies.ddp import DDPStrategy

__all__ = ["DDPStrategy", "Strategy"]
