"""What a training computes does not depend on how many processes compute it.

Each test takes one way in which trainers get numbers wrong, and compares 1, 2, 3 and 4 real ranks
with a plain loop or a closed form: shorter last batches, padded evaluation sets, token weights that
vary, clipping in the wrong place, means of means, schedules that run too fast, a reducer that is
gone around. The last part compares whole loss curves.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from everywhere import Everywhere, train
from support import (
    Regression,
    TokenRegression,
    adamw,
    assert_same,
    samples,
    train_by_hand,
    weighted_samples,
    weights,
)
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)

from recipes.language_model import ByteTransformer, Windows, collate, read_topics
from recipes.mnist import ORIGINAL_FILES, PIXEL_MEAN, PIXEL_STD, Digits, MnistTask, read_pair
from trainer import Callback, OptimizerSetup, TaskModule, Trainer

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> Everywhere:
    experiments = (
        every_size,
        token_weights,
        logged,
        schedules,
        around_forward,
        recipe_curves,
        normalized,
    )
    return Everywhere(tmp_path_factory.mktemp("ranks"), experiments)


class NotingSGD(torch.optim.SGD):
    """Notes, for every step, the rate and the norm of the gradients that it was given."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.rates: list[float] = []
        self.norms: list[float] = []

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        self.rates.append(group["lr"])
        squares = [p.grad.square().sum() for p in group["params"]]
        self.norms.append(float(torch.stack(squares).sum().sqrt()))
        return super().step()


class Kept:
    """Builds a `NotingSGD` and keeps it."""

    def __call__(self, params: Any) -> NotingSGD:
        self.optimizer = NotingSGD(params)
        return self.optimizer


# Shorter last batches, and sets of every size


class Scored(Regression):
    """Has a metric, and predicts its outputs."""

    def build_metrics(self, split: str) -> Any:
        from torchmetrics import MeanAbsoluteError

        return {"apart": MeanAbsoluteError().set_dtype(torch.float64)}

    def update_metrics(self, metrics: Any, outputs: Tensor, batch: Any) -> None:
        metrics["apart"].update(outputs, batch[1])


SIZES = range(1, 13)  # up to two whole global batches and a shorter one


def size_options(size: int) -> dict[str, Any]:
    return {
        "global_batch_size": 5,
        "micro_batch_size": 1 + size % 3,
        "max_epochs": 2,
        "eval_batch_size": 2,
        "validate_every_n_epochs": 2,
        "checkpoint": {"every_n_epochs": 2},
    }


def every_size(folder: Path) -> list[Any]:
    quiet: Any = {"accelerator": "cpu", "callbacks": False, "logger": False}
    trainer = Trainer(eval_batch_size=2, **quiet)
    found: list[Any] = [
        (trainer.validate(Scored(), val=samples(0)), trainer.predict(Scored(), predict=samples(0)))
    ]
    for size in SIZES:
        task, data = Scored(adamw), samples(size)
        result = train(task, folder / str(size), train=data, val=data, **size_options(size))
        clock = result.step, result.epoch, result.samples
        predicted = trainer.predict(task, predict=data)
        found.append((clock, result.metrics, weights(task), predicted))
    return found


def test_every_size_of_data_gives_the_weights_metrics_and_predictions_of_a_plain_loop(
    everywhere: Everywhere,
) -> None:
    for ranks in everywhere.outcomes(every_size).values():
        for rank, ((metrics, nothing), *_) in enumerate(ranks):
            assert metrics == {}
            assert nothing == ([] if rank == 0 else None)
    for size in SIZES:
        task, data = Scored(adamw), samples(size)
        loss = train_by_hand(task, data, global_batch_size=5, epochs=2)
        x, y = data.tensors
        with torch.no_grad():
            outputs = task((x, y))
        errors = outputs - y
        expected = {
            "train/loss": loss,
            "val/loss": float(errors.square().mean()),
            "val/apart": float(errors.abs().mean()),
        }
        for ranks in everywhere.outcomes(every_size).values():
            for rank, found in enumerate(ranks):
                clock, metrics, final, predicted = found[size]
                assert clock == (2 * -(-size // 5), 2, 2 * size)
                assert {name: metrics[name] for name in expected} == pytest.approx(expected)
                assert_same(final, task)
                if rank == 0:
                    torch.testing.assert_close(predicted, outputs)
                else:
                    assert predicted is None


# Weights of the loss, and clipping

# Micro-batches of 2, global batches of 8. On 4 ranks the first and the second rank of the first
# step have no weight, the second step has none at all, and the last step ends in a micro-batch of
# one sample without weight.
WEIGHTS = [0, 0, 0, 0, 0.25, 7, 300, 2] + [0] * 8 + [1, 0, 0, 3.5, 0, 0, 50, 1] + [7, 0, 40, 1, 0]


CLIP = {2: 0.3, 3: None}  # by micro-batch size


def token_weights(folder: Path) -> dict[int, Any]:
    found = {}
    for micro, clip in CLIP.items():
        kept = Kept()
        task = TokenRegression(kept)
        result = train(
            task,
            folder / str(micro),
            train=weighted_samples(WEIGHTS),
            global_batch_size=8,
            micro_batch_size=micro,
            max_epochs=2,
            gradient_clip_norm=clip,
        )
        norms = kept.optimizer.norms
        found[micro] = result.step, result.metrics["train/loss"], norms, weights(task)
    return found


@pytest.mark.parametrize("micro", CLIP)
def test_every_token_counts_the_same_and_gradients_are_clipped_once_at_the_end(
    micro: int, everywhere: Everywhere
) -> None:
    kept = Kept()
    task, data = TokenRegression(kept), weighted_samples(WEIGHTS)
    loss = train_by_hand(task, data, global_batch_size=8, epochs=2, clip=CLIP[micro])
    assert len(kept.optimizer.norms) == 6, "a step without weight changes nothing"
    for found in everywhere.outcome(token_weights):
        step, found_loss, norms, final = found[micro]
        assert step == 8, "a step without weight counts"
        # The true weight of a step travels in float32.
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert norms == pytest.approx(kept.optimizer.norms, rel=1e-6)
        assert_same(final, task, 1e-6)


# Means of what is logged


class Picky(Regression):
    """Logs a value for some samples only, so a different number of times on each rank."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        for number in batch[1].tolist():
            if number < 3 or number in (7, 11):
                self.log("picked", int(number), weight=1)
        self.log("all", batch[1].mean())
        return super().loss(outputs, batch)


def numbered(count: int) -> TensorDataset:
    """The target of a sample is its number."""
    return TensorDataset(samples(count).tensors[0], torch.arange(count).double())


def logged(folder: Path) -> dict[str, float]:
    options: Any = {"global_batch_size": 8, "micro_batch_size": 2, "max_epochs": 1}
    found: dict[str, float] = train(
        Picky(), folder, train=numbered(13), val=numbered(5), **options
    ).metrics
    return found


def test_the_mean_of_a_logged_value_is_over_all_its_values_wherever_they_were_logged(
    everywhere: Everywhere,
) -> None:
    for found in everywhere.outcome(logged):
        assert found["train/picked"] == pytest.approx((0 + 1 + 2 + 7 + 11) / 5, rel=1e-15)
        assert found["train/all"] == pytest.approx(sum(range(13)) / 13, rel=1e-15)
        assert found["val/picked"] == (0 + 1 + 2) / 3
        assert found["val/all"] == sum(range(5)) / 5


# One clock


def falling(interval: str) -> tuple[Kept, Callable[[Any], OptimizerSetup]]:
    kept = Kept()

    def build(params: Any) -> OptimizerSetup:
        optimizer = kept(params)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
        return OptimizerSetup(optimizer, schedule, interval=interval)

    return kept, build


def schedules(folder: Path) -> dict[Any, Any]:
    found = {}
    for interval, micro in itertools.product(("step", "epoch"), (None, 1)):
        kept, build = falling(interval)
        options: Any = {"global_batch_size": 5, "micro_batch_size": micro, "max_epochs": 2}
        place = folder / f"{interval} {micro}"
        result = train(Regression(build), place, train=samples(12), **options)
        found[interval, micro] = kept.optimizer.rates, result.step
    return found


def test_a_schedule_advances_once_per_optimizer_step_or_epoch(everywhere: Everywhere) -> None:
    expected = {
        "step": [0.1, 0.1 / 2, 0.1 / 3, 0.1 / 4, 0.1 / 5, 0.1 / 6],
        "epoch": [0.1, 0.1, 0.1, 0.1 / 2, 0.1 / 2, 0.1 / 2],
    }
    for found in everywhere.outcome(schedules):
        assert len(found) == 4
        for (interval, _), (rates, step) in found.items():
            assert rates == pytest.approx(expected[interval], rel=1e-12)
            assert step == 6


# The reducer


class AroundForward(Regression):
    """Does everything in ``loss``, by calls of its own submodules."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.head = nn.Linear(1, 1).double()
        nn.init.constant_(self.head.weight, 0.7)
        nn.init.constant_(self.head.bias, 0.2)

    def forward(self, batch: Any) -> Any:
        return batch

    def encode(self, x: Tensor) -> Any:
        return torch.func.functional_call(self.net, dict(self.net.named_parameters()), (x,))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        x, y = outputs
        return F.mse_loss(self.head(self.encode(x)).squeeze(1), y)


def around_forward(folder: Path) -> dict[str, Tensor]:
    task = AroundForward()
    options: Any = {"global_batch_size": 7, "micro_batch_size": 2, "max_epochs": 2}
    train(task, folder, train=samples(16), **options)
    return weights(task)


def test_parameters_that_only_the_loss_uses_are_reduced_too(everywhere: Everywhere) -> None:
    task = AroundForward()
    train_by_hand(task, samples(16), global_batch_size=7, epochs=2)
    for found in everywhere.outcome(around_forward):
        assert_same(found, task)


def test_all_ranks_end_every_training_with_the_same_weights(everywhere: Everywhere) -> None:
    everywhere.assert_equal_weights()


# Whole loss curves


class Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, run: Any, metrics: Any) -> None:
        self.found.append(metrics["train/loss"])


def curve(task: TaskModule, folder: Path, **options: Any) -> list[float]:
    """The losses of all steps, on rank 0."""
    losses = Losses()
    always: dict[str, Any] = {"callbacks": [losses], "log_every_n_steps": 1, "num_threads": 1}
    train(task, folder, **always, **options)
    return losses.found


class DigitsInDouble(MnistTask):
    """The recipe's net in float64.

    In float32 a difference in the last bit may switch a unit on or off, which then grows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, batch: Any) -> Tensor:
        logits: Tensor = self.net((batch[0].unsqueeze(1).double() - PIXEL_MEAN) / PIXEL_STD)
        return logits


DIGITS = Digits(*(part[:300] for part in read_pair(ORIGINAL_FILES, "t10k")))
TEXT = Windows(read_topics()[:2], length=32)


def recipe_curves(folder: Path) -> dict[str, list[float]]:
    torch.manual_seed(0)
    digits, text = DigitsInDouble(), ByteTransformer(context=32, width=32)
    windows = DataLoader(TEXT, batch_size=16, shuffle=True, collate_fn=collate)
    size: Any = {"global_batch_size": 32, "micro_batch_size": 4, "shuffle": True}
    return {
        "digits": curve(digits, folder / "digits", train=DIGITS, max_steps=15, **size),
        "text": curve(text, folder / "text", train=windows, micro_batch_size=4, max_steps=25),
    }


def test_loss_curves_of_the_recipes_agree_within_rounding(everywhere: Everywhere) -> None:
    by_size = {size: ranks[0] for size, ranks in everywhere.outcomes(recipe_curves).items()}
    one = by_size.pop(1)
    assert one["digits"][-1] < one["digits"][0] - 0.5
    assert one["text"][-1] < one["text"][0] - 1
    for found in by_size.values():
        assert found["digits"] == pytest.approx(one["digits"], rel=1e-10)
        assert found["text"] == pytest.approx(one["text"], rel=1e-5)  # in float32


class Normalized(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(5).double())


def normalized(folder: Path) -> Any:
    task, data = Normalized(), samples(48)
    size: Any = {"global_batch_size": 12, "micro_batch_size": 3, "max_epochs": 2}
    losses = curve(task, folder, train=data, **size)
    quiet: Any = {"accelerator": "cpu", "callbacks": False, "logger": False}
    evaluated = Trainer(**quiet).validate(task, val=data)["val/loss"]
    return losses, weights(task), evaluated


def normalized_by_hand(world_size: int) -> Any:
    """Train on micro-batches, with the running statistics of those that rank 0 computes."""
    task, data, losses = Normalized(), samples(48), []
    optimizer, norm = task.configure_optimizers(), task.net[1]
    for _, start in itertools.product(range(2), range(0, 48, 12)):
        optimizer.zero_grad()
        losses.append(0.0)
        for number in range(4):
            statistics = copy.deepcopy(norm.state_dict())
            first = start + 3 * number
            batch = data[first : first + 3]
            loss = task.loss(task(batch), batch) / 4
            loss.backward()
            losses[-1] += loss.item()
            if number >= -(-4 // world_size):  # another rank's
                with torch.no_grad():
                    for name, buffer in norm.named_buffers():
                        buffer.copy_(statistics[name])
        optimizer.step()
    with torch.no_grad():
        evaluated = F.mse_loss(task.eval()(data.tensors), data.tensors[1])
    return losses, weights(task), float(evaluated)


def test_batchnorm_trains_alike_and_is_evaluated_with_rank_0s_statistics(
    everywhere: Everywhere,
) -> None:
    """Each micro-batch is normalised by itself, so training does not depend on the ranks.

    The running statistics do, and with them evaluation: only rank 0's micro-batches enter them.
    """
    evaluations = set()
    for world_size, ranks in everywhere.outcomes(normalized).items():
        losses, final, evaluated = normalized_by_hand(world_size)
        evaluations.add(round(evaluated, 6))
        assert ranks[0][0] == pytest.approx(losses, rel=1e-9)
        for _, found, found_evaluated in ranks:
            assert_same(found, final)
            assert found_evaluated == pytest.approx(evaluated, rel=1e-9)
    assert len(evaluations) == 3, "2 and 3 ranks give rank 0 the same micro-batches"
