"""What a server sets in its process when it begins to serve."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, threading
from rollplane.server.ops import keep_freed_memory

def answers(count):
    for _ in range(count):
        blocks = [b"x" * 150_000 for _ in range(20)]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def measure():
    answers(20)
    before = faults()
    answers(100)
    print((faults() - before) / 100)

if sys.argv[1] == "kept":
    keep_freed_memory()
thread = threading.Thread(target=measure)
thread.start()
thread.join()
"""


def page_faults(how: str, **environment: str) -> float:
    """Per answer of 3 MB in blocks, made and dropped in a thread of the pool."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", FAULTS, how]
    done = subprocess.run(command, env=plain | environment, capture_output=True, text=True, timeout=60, check=True)
    return float(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_memory_of_an_answer_is_kept_for_the_next_one() -> None:
    assert page_faults("kept") < 10 < 100 < page_faults("given back")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_what_the_operator_set_for_malloc_stays() -> None:
    assert page_faults("kept", MALLOC_TRIM_THRESHOLD_="65536", MALLOC_MMAP_THRESHOLD_="65536") > 100


TURNS = """
import sys, threading, time
from rollplane.server.ops import prepare_process

over = False

def work():
    while not over:
        sum(range(2000))

if sys.argv[1] == "prepared":
    prepare_process()
threading.Thread(target=work).start()
began = time.perf_counter()
for _ in range(50):
    time.sleep(0.001)
print((time.perf_counter() - began) / 50)
over = True
"""


def turn_s(how: str) -> float:
    """Seconds from one turn of a loop to the next, one millisecond of them asleep, beside a thread that is at work."""
    command = [sys.executable, "-c", TURNS, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return float(done.stdout)


def test_the_event_loop_has_its_turns_beside_a_thread_at_work() -> None:
    assert turn_s("prepared") < turn_s("as Python is") / 1.5
