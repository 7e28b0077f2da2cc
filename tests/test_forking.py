"""How a rank forks beside the threads of its group."""

import hashlib
import threading
import time

from trainer import forking


def test_fork_waits_for_a_moment_in_which_other_threads_rest():
    may_end = threading.Event()
    resting = threading.Thread(target=may_end.wait)
    resting.start()
    # In compiled code, as gloo's: it does not hold the GIL.
    running = threading.Thread(target=lambda: hashlib.pbkdf2_hmac("md5", b"", b"", 6_000_000))
    running.start()
    time.sleep(0.1)
    assert forking._others_run()
    start = time.monotonic()
    forking.wait_for_rest(at_most_s=0.2)
    assert time.monotonic() - start >= 0.2
    assert running.is_alive()  # there is none, and it is not waited for

    running.join()
    start = time.monotonic()
    forking.wait_for_rest(at_most_s=60)
    assert time.monotonic() - start < 30
    may_end.set()
    resting.join()
