# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest

from openenvd.system.process import forking

PROGRAM = """
import ctypes, os, random, signal, threading
from openenvd.system.process import forking

called = []
for when in ("before", "after_in_parent", "after_in_child"):
    os.register_at_fork(**{when: lambda when=when: called.append(when)})
def run():
    assert os.getppid() == parent
    assert called == ["before", "after_in_child"]
    assert threading.get_native_id() == os.getpid()
    address = ctypes.c_void_p()
    assert ctypes.CDLL(None).prctl(40, ctypes.byref(address), 0, 0, 0) == 0
    assert ctypes.c_int.from_address(address.value).value == os.getpid()
    assert random.getstate() != state
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    thread = threading.Thread(target=called.append, args=("ran",))
    thread.start(), thread.join()
    os._exit(7 if called[-1] == "ran" else 8)

def interrupt(*_):
    raise KeyboardInterrupt

if not (middle := os.fork()):
    called.clear()
    parent, state = os.getppid(), random.getstate()
    assert forking.fork_sibling(run) not in (0, os.getpid())
    assert called == ["before", "after_in_parent"]
    signal.signal(signal.SIGALRM, interrupt)
    os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGALRM))
    try:
        forking.fork_sibling(lambda: os._exit(9))
    except KeyboardInterrupt:  # after the fork, and in this process alone
        os._exit(0)
    os._exit(1)
codes = []
while True:
    try:
        codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
    except ChildProcessError:
        break
assert sorted(codes) == [0, 7, 9], codes
"""


@pytest.mark.skipif(not forking.CAN_FORK_SIBLINGS, reason="for Linux's clone(2)")
def test_a_forked_sibling_is_a_child_of_its_parents_parent() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


@pytest.mark.skipif(not forking.CAN_FORK_SIBLINGS, reason="for Linux's clone(2)")
def test_a_sibling_that_cannot_be_forked_raises() -> None:
    code = (
        "import os, resource\nfrom openenvd.system.process import forking\n"
        "if os.getuid() == 0: os.setuid(65534)\n"  # root has no limit
        "resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))\n"
        "try:\n  forking.fork_sibling(os.abort)\n"
        "except BlockingIOError: os._exit(5)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 5
