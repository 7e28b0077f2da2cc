"""Ranks find each other, also where their predecessors have met before."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from trainer import meeting
from trainer.diagnosis.failures import RankError
from trainer.meeting import meet_in

pytestmark = pytest.mark.timeout(60)


def together(store: HashStore, world_size: int) -> list[meeting.Meeting]:
    deadline = time.monotonic() + 20
    with ThreadPoolExecutor(world_size) as pool:
        ranks = range(world_size)
        return list(pool.map(lambda n: meet_in(store, n, world_size, deadline, "here"), ranks))


def test_all_meet_in_a_store_that_only_they_use() -> None:
    store = HashStore()
    first, second = together(store, 2)
    first.store.set("key", "value")
    assert second.store.get("key") == b"value"
    assert first.launch == second.launch
    assert first.number == second.number == 0


def test_successors_do_not_take_their_predecessors_for_themselves() -> None:
    store = HashStore()
    before = together(store, 3)[0]
    before.store.set("key", "old")
    alone = together(store, 1)[0]  # two have gone
    after = together(store, 3)  # and have come back
    assert [alone.number, after[0].number] == [1, 2]
    assert {each.launch for each in after} == {before.launch}
    assert not after[2].store.check(["key"])


def test_rank_0_waits_for_the_living(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has called the roll with the name of a dead rank before the new one comes."""
    monkeypatch.setattr(meeting, "_PATIENCE_S", 0.05)
    said: list[str] = []
    monkeypatch.setattr(meeting, "_say", lambda text, left_s: said.append(text))
    store = HashStore()
    store.set("name/1", "dead")
    deadline = time.monotonic() + 20
    late: list[meeting.Meeting] = []

    def come() -> None:
        while not said:
            time.sleep(0.01)
        late.append(meet_in(store, 1, 2, deadline, "here"))

    thread = threading.Thread(target=come)
    thread.start()
    first = meet_in(store, 0, 2, deadline, "here:1")
    thread.join()
    assert late[0].number == first.number == 0
    assert said[0] == "rank 0 waits at here:1 for rank 1"


def test_who_does_not_come_is_named() -> None:
    store = HashStore()
    soon = time.monotonic() + 0.2
    store.set("name/1", "dead")
    with pytest.raises(RankError, match=r"rank 2 did not come to here:1 in time: is it started"):
        meet_in(store, 0, 3, soon, "here:1")
    with pytest.raises(RankError, match=r"rank 1 waited at here:1, but rank 0 has not called"):
        meet_in(HashStore(), 1, 2, soon, "here:1")
