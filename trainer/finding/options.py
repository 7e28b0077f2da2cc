"""Every option of the finders: how far to look."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.options import check_fields, option


@dataclass
class FindLRConfig:
    """Every option of ``Trainer.find_lr`` and, as ``find_lr.<name>=...``, of ``mode=find_lr``.

    Raises:
        ValueError: For a value of the wrong type or out of range.
    """

    min_lr: float = option(1e-7, "The learning rate of the first step.", above=0)
    max_lr: float = option(
        10.0, "That of the last one, if the loss has not diverged by then.", above=0
    )
    steps: int = option(100, "Optimizer steps from the one to the other, at most.", at_least=10)
    optimizer: str | None = option(
        None, "Of a task with several optimizers, the one whose rate to look for."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_lr <= self.min_lr:
            raise ValueError(
                f"max_lr={self.max_lr:g} is not above min_lr={self.min_lr:g}; there is nothing "
                "between them to look at"
            )


@dataclass
class FindMicroBatchSizeConfig:
    """Every option of ``Trainer.find_micro_batch_size``, and of the mode of that name.

    Raises:
        ValueError: For a value of the wrong type or out of range.
    """

    memory_limit_mb: float | None = option(
        None,
        "MiB that a rank may take. On CUDA: of the device, by torch's allocator; null: 95 % of it. "
        "On the CPU: resident memory of the whole process, and it must be given.",
        above=0,
    )

    def __post_init__(self) -> None:
        check_fields(self)
