"""The kernel calls that the lab needs and Python 3.10 lacks. Knows nothing of nodes or modes."""

import ctypes
import errno
import os
import signal

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18

_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


class NamespaceError(Exception):
    """The kernel refuses namespaces; the message says what to do about it."""


def _check(result, what):
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags):
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source, target, fstype, flags, data=None):
    encoded = [None if s is None else s.encode() for s in (source, target, fstype, data)]
    _check(
        _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]),
        f"mount {fstype or 'bind'} on {target}",
    )


def die_with_parent():
    """The kernel kills this process as soon as the thread that started it ends, in any way."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0), "prctl")


def _read(path):
    try:
        with open(path) as f:
            return f.read().strip()
    except OSError:
        return None


def _why_refused(error):
    if _read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        return "AppArmor restricts user namespaces: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    if _read("/proc/sys/kernel/unprivileged_userns_clone") == "0":
        return "user namespaces are switched off: sysctl -w kernel.unprivileged_userns_clone=1"
    if _read("/proc/sys/user/max_user_namespaces") == "0":
        return "user namespaces are switched off: sysctl -w user.max_user_namespaces=15000"
    if os.geteuid() == 0:
        return "this root lacks CAP_SYS_ADMIN: in Docker or Podman, start the container with --privileged"
    return f"the kernel says: {error.strerror}"


def _map_to_root():
    uid, gid = os.getuid(), os.getgid()
    unshare(CLONE_NEWUSER)
    for path, text in (
        ("/proc/self/setgroups", "deny"),
        ("/proc/self/uid_map", f"0 {uid} 1"),
        ("/proc/self/gid_map", f"0 {gid} 1"),
    ):
        with open(path, "w") as f:
            f.write(text)


def enter(flags):
    """New namespaces for this process's children: directly as root, else inside a user namespace."""
    try:
        unshare(flags)
        return
    except OSError as error:
        if error.errno != errno.EPERM:
            raise NamespaceError(f"cannot create namespaces: {error}") from error
    try:
        _map_to_root()
        unshare(flags)
    except OSError as error:
        raise NamespaceError(
            "cannot create network namespaces, neither directly nor in a user namespace.\n"
            f"Run fcdp-lab as root, or allow user namespaces: {_why_refused(error)}"
        ) from error


def mount_private(node_hosts=None):
    """Mounts of this process become its own; gives it a /proc of its PID namespace, or a node's own files."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    if node_hosts is None:
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        return
    mount(node_hosts, "/etc/hosts", None, MS_BIND)
    if os.path.isdir("/dev/shm"):
        mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
