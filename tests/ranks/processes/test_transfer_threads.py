"""Arrays of a process that has other threads, on their way to the ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITH_THREADS = """
import mmap, sys, threading
import numpy as np
import tqdm
from trainloop._transfer import pack

data, over, written = np.zeros(64 << 20, np.uint8), threading.Event(), threading.Event()

def write():
    while not over.is_set():
        data[:: mmap.PAGESIZE] += 1
        written.set()

thread = threading.Thread(target=write)
thread.start()
written.wait(20)
with pack({"data": data}) as payload:
    assert payload.shared_in_place == 0
over.set()
thread.join()
assert (data[:: mmap.PAGESIZE] == data[0]).all()
with tqdm.tqdm(total=1, file=sys.stdout), pack({"data": data}) as payload:
    assert len(threading.enumerate()) == 2, "the bar's monitor"
    assert payload.shared_in_place > 60 << 20
"""


@pytest.mark.long
def test_arrays_are_copied_while_another_thread_may_write_into_them() -> None:
    """A write between the copy into the file and the mapping would be lost."""
    done = subprocess.run([sys.executable, "-c", WITH_THREADS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
