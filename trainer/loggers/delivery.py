"""Calls that may fail or take long, made one after another in a thread of their own."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from textwrap import shorten
from typing import NamedTuple

from trainer.messages import counted, warn

TRIES = 3
LONGEST_PAUSE_S = 30.0
PATIENCE_S = 20.0  # of a callback that asks for a logger
SAY_AFTER_S = 2.0  # that the end of the run waits
_LONGEST_REASON = 200  # characters of an error's text


class Call(NamedTuple):
    """Something to deliver.

    Attributes:
        what: Its kind, for messages: "event".
        make: Delivers it, or raises.
    """

    what: str
    make: Callable[[], object]


class Delivery:
    """Brings calls to something that may be slow or away; who hands them over never waits.

    Calls are made in their order. One that raises is made again after a pause, `TRIES` times; then
    it is put aside, and goes out again as soon as another call gets through. If it fails even then,
    it is the call that is wrong, and it is dropped. So what comes while a service is away waits for
    it, up to ``capacity`` calls; beyond that the oldest are dropped. All that is dropped is counted
    and told of.
    """

    def __init__(self, name: str, capacity: int = 1000, pause_s: float = 1.0) -> None:
        """Note the arguments; `start` begins.

        Args:
            name: Of the receiver, for messages.
            capacity: The most calls that wait.
            pause_s: Seconds after a first failure; twice as many after the next, up to
                `LONGEST_PAUSE_S`.
        """
        self.name = name
        self._connected = threading.Event()
        self._capacity = capacity
        self._pause_s = pause_s
        self._waiting: deque[Call] = deque()
        self._aside: deque[Call] = deque()  # failed, and not for being wrong, as far as is known
        self._in_hand: Call | None = None  # neither waiting any more nor arrived yet
        self._is_making = False  # that call, at this moment
        self._first: Call | None = None
        self._last: Call | None = None
        self._handed: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._failures = 0  # in a row
        self._error = ""
        self._changed = threading.Condition()  # guards all of these
        self._ending = threading.Event()
        self._deadline = float("inf")
        self._has_waited = False  # for the connection, in `wait_until_connected`
        self._has_told_full = self._has_told_again = False
        self._thread: threading.Thread | None = None

    def start(self, connect: Callable[[], object], first: Call) -> None:
        """Begin, in a new thread.

        Args:
            connect: Called again and again until it does not raise; nothing can arrive before.
            first: The first call after it.
        """
        with self._changed:
            self._handed[first.what] += 1
            self._first = first
        self._thread = threading.Thread(
            target=self._main, args=(Call("connection", connect),), name=self.name, daemon=True
        )
        self._thread.start()

    def put(self, call: Call) -> None:
        """Hand over a call. Returns at once."""
        with self._changed:
            self._handed[call.what] += 1
            if len(self._waiting) + len(self._aside) >= self._capacity:
                oldest = self._aside or self._waiting
                self._lost[oldest.popleft().what] += 1
                is_new, self._has_told_full = not self._has_told_full, True
            else:
                is_new = False
            self._waiting.append(call)
            self._changed.notify()
        if is_new:
            self._warn(f"is {counted(self._capacity, 'event')} behind: the oldest are dropped")

    def wait_until_connected(self) -> None:
        """Wait until calls arrive, but not for ever, and not again after that."""
        if self._thread is None or self._has_waited:
            return
        self._has_waited = True
        if not self._connected.wait(PATIENCE_S):
            self._warn(f"is not open after {PATIENCE_S:g} s, and a callback asks for it")

    def end(self, last: Call, wait_s: float) -> None:
        """Have ``last`` come last, and all be over in ``wait_s`` seconds. Returns at once."""
        with self._changed:
            self._handed[last.what] += 1
            self._last = last
            self._failures = 0
            self._deadline = time.monotonic() + wait_s
            self._ending.set()
            self._changed.notify()

    def join(self) -> None:
        """Wait for what `end` began, and say what was lost."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, min(SAY_AFTER_S, self._deadline - time.monotonic())))
        left_s = self._deadline - time.monotonic()
        if self._thread.is_alive() and left_s > 0:
            print(f"waiting for {self.name}, up to {left_s:.0f} s", flush=True)
            self._thread.join(left_s)
        with self._changed:
            left = [self._first, *self._aside, *self._waiting, self._in_hand, self._last]
            self._lost.update(call.what for call in left if call is not None)
            self._aside.clear()
            self._waiting.clear()
            self._first = self._last = None
            del self._lost["connection"]
            lost = " and ".join(map(self._counted, self._lost))
            why = self._error or "it was too slow"
            if self._in_hand is not None and self._is_making:
                why = f"its {self._in_hand.what} took too long"
        if lost:
            self._warn(f"lost {lost} ({why})")

    def _main(self, connect: Call) -> None:
        with self._changed:
            self._in_hand = connect
        while not self._arrives(connect):
            if self._is_over():
                return
        self._connected.set()
        while (call := self._next()) is not None:
            is_hurried = bool(self._aside) or (self._ending.is_set() and self._last is not None)
            self._deliver(call, tries=1 if is_hurried else TRIES)

    def _next(self) -> Call | None:
        """Return the next call, as soon as there is one; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._first or self._waiting or self._ending.is_set())
            if self._is_over():
                return None
            if self._first is not None:
                self._in_hand, self._first = self._first, None
            elif self._waiting:
                self._in_hand = self._waiting.popleft()
            elif self._aside and self._failures == 0:
                self._in_hand = self._aside.popleft()
            else:
                self._in_hand, self._last = self._last, None
            return self._in_hand

    def _deliver(self, call: Call, tries: int) -> None:
        if not any(self._arrives(call) for _ in range(tries)):
            with self._changed:
                self._in_hand = None
                self._aside.append(call)
            return
        while (again := self._set_aside()) is not None:
            if not self._arrives(again):
                with self._changed:
                    self._in_hand = None
                    self._lost[again.what] += 1
                return  # the others have their turn after the next that gets through

    def _set_aside(self) -> Call | None:
        with self._changed:
            self._in_hand = self._aside.popleft() if self._aside else None
            return self._in_hand

    def _arrives(self, call: Call) -> bool:
        """Make a call; if it raises, note that, pause, and return False."""
        with self._changed:
            self._is_making = True
        try:
            call.make()
        except BaseException as error:  # libraries of services raise whatever they like
            self._fail(error)
            return False
        with self._changed:
            self._is_making = False
            self._in_hand = None
            self._failures = 0
        if self._error and not self._has_told_again:
            self._has_told_again = True
            print(f"{self.name} works again", file=sys.stderr, flush=True)
        return True

    def _fail(self, error: BaseException) -> None:
        text = shorten(str(error).strip().partition("\n")[0], _LONGEST_REASON)
        with self._changed:
            self._is_making = False
            is_first = not self._error
            # The first of a row: the next ones may only follow from it ("the run exists already").
            if is_first or not (self._failures or self._ending.is_set()):
                self._error = f"{type(error).__name__}: {text}".rstrip(": ")
            self._failures += 1
            pause_s = min(self._pause_s * 2 ** min(self._failures - 1, 20), LONGEST_PAUSE_S)
        if is_first:
            self._warn(f"failed ({self._error}); it is tried again, and training goes on")
        if self._ending.is_set():
            time.sleep(max(0.0, min(pause_s, self._deadline - time.monotonic())))
        else:
            self._ending.wait(pause_s)

    def _is_over(self) -> bool:
        """Whether the end has come, and with it the end of hope."""
        if not self._ending.is_set():
            return False
        return self._failures >= TRIES or time.monotonic() > self._deadline

    def _counted(self, what: str) -> str:
        handed = self._handed[what]
        return f"its {what}" if handed == 1 else f"{self._lost[what]} of {counted(handed, what)}"

    def _warn(self, text: str) -> None:
        warn(f"{self.name} {text}")
