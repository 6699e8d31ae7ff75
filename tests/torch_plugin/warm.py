"""Ranks that start warm: a process that has imported torch, once, and forks each rank from there.  A rank's
imports are 4 s of a core, more than most jobs then do.  Only torch is shared: FCDP comes in by the wheel's
own line (fcdp.pth), after the fork, and before anything of the test's.  A rank ends once its threads have and what was registered with atexit
has run: tearing down all of torch would be two thirds of a short job's time.  What a warm start and such an end
cannot show, some jobs show with a cold one: that the interpreter's start turns FCDP on and its end takes FCDP
down, and that ranks which hash strings differently and map libraries elsewhere agree.

warm.py DESCRIPTOR: a SEQPACKET socket that brings a JSON each, with the descriptor of a pipe; into that go the rank's pid and,
when it has ended, its exit status.  Or a JSON with "preload", and the descriptor of another such socket: a fork of this
process imports more (modules, and folders to find them in) and serves that.  Each ends when its socket does."""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pathlib
import signal
import socket
import sys
import sysconfig
import tempfile
import threading

import torch
import torch.distributed.fsdp  # noqa: F401

HERE = pathlib.Path(__file__).resolve().parent
LARGEST = 1 << 16
# What dynamo imports when it compiles first; a torch that has no such module imports it then.
OF_DYNAMO = [
    "torch._dynamo.debug_utils",
    "torch._dynamo.backends.debugging",
    "torch._inductor.compile_fx",
    "torch._inductor.async_compile",
    "torch._inductor.select_algorithm",
    "torch._export.db.logging",
    "torch._functorch.aot_autograd",
]


def rename(tag_name, tag):
    """What /proc/PID/environ shows is the memory that this process's environment was started in: the tag goes
    there, over one as long."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    at = libc.getenv(tag_name.encode())
    assert len(ctypes.string_at(at)) == len(tag)
    ctypes.memmove(at, tag.encode(), len(tag))


def leave_session():
    """The kernel may share the cores out by session first (sched(7), autogroup). With a session for each rank, the C tests
    that run beside would have a tenth of a core, and time out: so these sessions weigh less."""
    os.setsid()
    with contextlib.suppress(OSError):  # a kernel without autogroups
        pathlib.Path("/proc/self/autogroup").write_text("10")


def become(order):
    """This process is a rank from here on; what remains is to run its script."""
    leave_session()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    rename(order["tag_name"], order["env"][order["tag_name"]])
    for name, descriptor in (("stdin", 0), ("out", 1), ("err", 2)):
        opened = os.open(order[name], os.O_RDONLY if name == "stdin" else os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(order["env"])
    tempfile.tempdir = None  # by the environment, again
    sys.argv[:] = order["argv"]


def be_ready(preload=()):
    """All that ranks share is imported, and no other thread is there: it would not be in its children."""
    for name in preload:
        sys.path.append(name) if "/" in name else importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a rank would write to, and so copy, all that it shares with the others
    assert len(os.listdir("/proc/self/task")) == 1
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # their status is not asked for


def serve(orders):
    """Returns in a process that is to be a rank, its order; None where no more orders come.  Between the two
    stands one that waits for the rank's end."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(orders, LARGEST, 1)
        if not data:
            return None
        order = json.loads(data)
        if os.fork():
            os.close(descriptors[0])
            continue
        orders.close()
        if "preload" in order:
            orders = socket.socket(fileno=descriptors[0])
            be_ready(order["preload"])
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pid = os.fork()
        if not pid:
            os.close(descriptors[0])
            return order
        os.write(descriptors[0], b"%d\n" % pid)
        _, status = os.waitpid(pid, 0)
        os.write(descriptors[0], b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)


def run_to_its_end(script):
    """As an interpreter does: the wheel's line, then the script at the top of the main module; but not the end of
    all modules."""
    status = 0
    try:
        exec(pathlib.Path(sysconfig.get_path("purelib"), "fcdp.pth").read_text(), {})
        exec(compile(pathlib.Path(script).read_text(), script, "exec"), globals())
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, (int, type(None))):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(status)


def load_dynamo():
    for name in OF_DYNAMO:
        try:
            importlib.import_module(name)
        except ImportError:
            pass


load_dynamo()
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # else pyarrow, which some import, has a thread
be_ready()
order = serve(socket.socket(fileno=int(sys.argv[1])))
if order:
    become(order)
    script = __file__ = order["argv"][0]
    run_to_its_end(script)
