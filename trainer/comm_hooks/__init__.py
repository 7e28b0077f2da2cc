"""Communication hooks: what DDP does with its buckets of gradients instead of an all-reduce."""

from trainer.comm_hooks.average import Hook, average_hook, overflow_in
from trainer.comm_hooks.beside import Beside
from trainer.comm_hooks.powersgd import PowerSGD

__all__ = ["Beside", "Hook", "PowerSGD", "average_hook", "overflow_in"]
