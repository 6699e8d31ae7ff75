"""What a job could leave on the machine, looked for before and after: shared memory, memfds held, sockets, files."""

import contextlib
import os


def shared_memory():
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def unix_sockets():
    """Names of UNIX sockets, abstract (@...) and in the file system."""
    with open("/proc/net/unix") as f:
        return {line.split()[7] for line in f.readlines()[1:] if len(line.split()) > 7}


def identity(path):
    found = os.stat(path)
    return found.st_dev, found.st_ino


def inodes_in_use():
    """(device, inode) of what live processes have mapped or open. Names would not do: a semaphore is mapped under another."""
    inodes = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/maps") as f:
                for _, _, _, device, inode, *_ in map(str.split, f):
                    inodes.add((os.makedev(*(int(part, 16) for part in device.split(":"))), int(inode)))
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    inodes.add(identity(f"/proc/{pid}/fd/{fd}"))
    return inodes


def unused(names):
    """Of names in /dev/shm, those that are there and that no live process has: other jobs run on this machine, too."""
    inodes = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            inodes[name] = identity(f"/dev/shm/{name}")
    used = inodes_in_use()
    return [name for name, inode in inodes.items() if inode not in used and os.path.exists(f"/dev/shm/{name}")]


class Leftovers:
    def __init__(self, tmp):
        self.tmp = tmp
        self.shared, self.sockets = shared_memory(), unix_sockets()
        self.files = self.named()

    def named(self):
        """Sockets and pipes in the job's own temporary folder."""
        found = set()
        for folder, _, files in os.walk(self.tmp):
            for name in files:
                path = os.path.join(folder, name)
                if not os.path.isfile(path):
                    found.add(path)
        return found

    def found(self):
        """What is there now, was not before, and belongs to no live process."""
        shared = unused(shared_memory() - self.shared)
        sockets = [n for n in unix_sockets() - self.sockets if "fcdp" in n.lower()]
        return shared + sockets + sorted(self.named() - self.files)
