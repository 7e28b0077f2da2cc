"""Whatever the receiver does, who hands something over does not wait, and learns what was lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from trainer.loggers import delivery
from trainer.loggers.delivery import Call, Delivery


class Service:
    """Takes numbers, unless it is away; some it refuses whatever happens."""

    def __init__(self) -> None:
        self.got: list[int | str] = []
        self.refused: set[int | str] = set()
        self.is_away = False
        self.tried = 0

    def take(self, value: int | str) -> None:
        self.tried += 1
        if self.is_away or value in self.refused:
            raise ConnectionError(f"no route for {value}")
        self.got.append(value)


def call(service: Service, value: int | str, what: str = "event") -> Call:
    return Call(what, lambda: service.take(value))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


class Watched(Delivery):
    """Sees that what both threads use is changed by one of them at a time."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("_failures", "_error", "_is_making", "_in_hand", "_first", "_last"):
            lock = vars(self).get("_changed")  # there is none yet while it is built
            assert lock is None or lock._is_owned(), name
        super().__setattr__(name, value)


def started(service: Service, capacity: int = 100) -> Delivery:
    courier = Watched("Service", capacity, pause_s=0.001)
    courier.start(lambda: service.take("connect"), call(service, "config", "config"))
    return courier


def end(courier: Delivery, service: Service, wait_s: float = 20) -> None:
    courier.end(call(service, "end", "final status"), wait_s)
    courier.join()


@contextmanager
def stuck(service: Service, courier: Delivery) -> Iterator[None]:
    """Have the service not answer meanwhile."""
    free, is_in = threading.Event(), threading.Event()

    def hang() -> None:
        is_in.set()
        free.wait(60)

    courier.put(Call("event", hang))
    assert is_in.wait(20)
    try:
        yield
    finally:
        free.set()


def test_everything_arrives_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    service = Service()
    courier = started(service)
    for number in range(50):
        courier.put(call(service, number))
    end(courier, service)
    assert service.got == ["connect", "config", *range(50), "end"]
    assert capfd.readouterr() == ("", "")


def test_what_comes_while_the_service_is_away_waits_for_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "LONGEST_PAUSE_S", 0.01)
    service = Service()
    courier = started(service)
    courier.put(call(service, 1))
    until(lambda: 1 in service.got)
    service.is_away = True
    for number in (2, 3, 4):
        courier.put(call(service, number))
    tried = service.tried
    until(lambda: service.tried > tried + 4)  # each of them has failed for now
    service.is_away = False
    courier.put(call(service, 5))
    end(courier, service)
    assert {2, 3, 4, 5} < set(service.got)
    assert service.got[-1] == "end"
    text = (
        "WARNING: Service failed (ConnectionError: no route for 2); it is tried again, and "
        "training goes on\nService works again\n"
    )
    assert capfd.readouterr().err == text


def test_a_call_that_is_wrong_by_itself_is_dropped_and_told_of(
    capfd: pytest.CaptureFixture[str],
) -> None:
    service = Service()
    service.refused = {"config", 2}
    courier = started(service)
    for number in range(1, 4):
        courier.put(call(service, number))
    end(courier, service)
    assert service.got == ["connect", 1, 3, "end"]
    err = capfd.readouterr().err
    assert "\nWARNING: Service lost its config and 1 of 3 events (ConnectionError: no" in err


def test_a_service_that_never_comes_does_not_hold_up_the_end(
    capfd: pytest.CaptureFixture[str],
) -> None:
    service = Service()
    service.is_away = True
    courier = started(service)
    for number in range(4):
        courier.put(call(service, number))
    end(courier, service, wait_s=60)  # it does not take that long, for it fails at once
    assert service.got == []
    last = "lost its config and 4 of 4 events and its final status (ConnectionError: no route for "
    assert f"WARNING: Service {last}connect)\n" in capfd.readouterr().err


def test_one_that_hangs_is_left_behind(capfd: pytest.CaptureFixture[str]) -> None:
    service = Service()
    courier = started(service)
    with stuck(service, courier):
        courier.put(call(service, 1))
        end(courier, service, wait_s=0.05)
        assert capfd.readouterr().err == (
            "WARNING: Service lost 2 of 2 events and its final status (its event took too long)\n"
        )
    thread = courier._thread
    assert thread is not None
    thread.join(20)
    assert service.got == ["connect", "config"]  # nothing comes after the end


def test_who_hands_over_never_waits_and_the_oldest_give_way(
    capfd: pytest.CaptureFixture[str],
) -> None:
    service = Service()
    courier = started(service, capacity=10)
    with stuck(service, courier):
        for number in range(25):
            courier.put(call(service, number))
    end(courier, service)
    assert service.got == ["connect", "config", *range(15, 25), "end"]
    assert capfd.readouterr().err == (
        "WARNING: Service is 10 events behind: the oldest are dropped\n"
        "WARNING: Service lost 15 of 26 events (it was too slow)\n"
    )


def test_an_exit_in_a_library_does_not_end_the_thread(capfd: pytest.CaptureFixture[str]) -> None:
    service = Service()
    courier = started(service)
    exits = iter([True])

    def leave() -> None:
        if next(exits, False):
            raise SystemExit

    courier.put(Call("event", leave))
    end(courier, service)
    assert service.got == ["connect", "config", "end"]
    assert "(SystemExit); it is tried again" in capfd.readouterr().err


def test_a_service_may_be_away_for_days(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "LONGEST_PAUSE_S", 0.0)
    service = Service()
    service.is_away = True
    courier = started(service, capacity=2)
    for number in range(4):
        courier.put(call(service, number))
    until(lambda: service.tried > 1100)  # two to the power of that is no float
    service.is_away = False
    end(courier, service)
    assert service.got == ["connect", "config", 2, 3, "end"]  # what it is about is not dropped


def test_a_callback_waits_for_the_connection_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(delivery, "PATIENCE_S", 0.02)
    service = Service()
    service.is_away = True
    courier = started(service)
    courier.wait_until_connected()
    courier.wait_until_connected()
    assert capfd.readouterr().err.count("is not open after 0.02 s") == 1
    end(courier, service)


def test_the_end_without_a_start() -> None:
    Delivery("Service").join()


def test_the_reason_of_a_loss_is_the_first_of_a_row_and_short(
    capfd: pytest.CaptureFixture[str],
) -> None:
    reasons = iter(["no network " + "x " * 500, "the run exists already", "it still exists"])

    def connect() -> None:
        raise ConnectionError(next(reasons, "it exists, really"))

    courier = Watched("Service", pause_s=0.001)
    courier.start(connect, Call("config", lambda: None))
    until(lambda: courier._failures > delivery.TRIES)
    courier.end(Call("final status", lambda: None), 20)
    courier.join()
    told = capfd.readouterr().err
    assert told.count("no network") == 2
    assert "exist" not in told
    assert max(map(len, told.splitlines())) < 400
