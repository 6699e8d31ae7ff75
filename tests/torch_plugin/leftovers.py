"""What a job could leave on the machine, looked for before and after: shared memory, memfds held, sockets, files."""

import os
import re


def shared_memory():
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def unix_sockets():
    """Names of UNIX sockets, abstract (@...) and in the file system."""
    with open("/proc/net/unix") as f:
        return {line.split()[7] for line in f.readlines()[1:] if len(line.split()) > 7}


def in_use():
    """Every name that a live process holds open or mapped."""
    names = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/maps") as f:
                names.update(m.group(1) for m in re.finditer(r"(/dev/shm/\S+)", f.read()))
            for fd in os.listdir(f"/proc/{pid}/fd"):
                names.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            continue
    return names


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
        """What is there now, was not before, and belongs to no live process (other jobs run on this machine too)."""
        used = in_use()
        shared = [n for n in shared_memory() - self.shared if f"/dev/shm/{n}" not in used]
        sockets = [n for n in unix_sockets() - self.sockets if "fcdp" in n.lower()]
        return shared + sockets + sorted(self.named() - self.files)
