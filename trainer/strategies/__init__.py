"""Ways of making several ranks train one model."""

from __future__ import annotations

import inspect

from trainer.config import TrainerConfig
from trainer.instantiate import build_node
from trainer.options import option_fields, show
from trainer.strategies.base import Strategy
from trainer.strategies.ddp import DDPStrategy
from trainer.strategies.fixed_order import FixedOrderDDP

__all__ = ["DDPStrategy", "FixedOrderDDP", "Strategy", "build_strategy"]


def build_strategy(config: TrainerConfig) -> Strategy:
    """Build the strategy that the options name.

    Args:
        config: Every option of the Trainer.

    Raises:
        ValueError: If a node builds something else, or there are options of DDP beside it.
    """
    options = {name: getattr(config, name) for name in inspect.signature(DDPStrategy).parameters}
    if config.strategy == "ddp":
        return FixedOrderDDP(**options) if config.reproducible else DDPStrategy(**options)
    defaults = option_fields(config)
    beside = {name: value for name, value in options.items() if value != defaults[name].default}
    if beside:
        given = ", ".join(f"{name}={show(value)}" for name, value in beside.items())
        raise ValueError(
            f"{given} given beside a strategy node: these options are for strategy=ddp and would "
            "do nothing; give the node what it needs as arguments of its own"
        )
    built = build_node(config.strategy, "strategy")
    if not isinstance(built, Strategy):
        raise ValueError(
            f"strategy is a {type(built).__name__}; it must be `ddp` or a node whose _target_ is a "
            "trainer.strategies.Strategy"
        )
    if config.reproducible and not isinstance(built, FixedOrderDDP):
        raise ValueError(
            f"reproducible=true with the strategy {type(built).__name__}: the order in which it "
            "adds gradients up is its own; use strategy=ddp, or derive yours from "
            "trainer.strategies.FixedOrderDDP"
        )
    return built
