"""Process 1 of a run: builds the network, starts the launcher on every node, reaps, and ends with the last node.

Events it sends: up (nodes ready, launchers starting), node_exit (node, code, sent, received), broken (message: the
network could not be built), done. It ends early, with everything below it, once a node failed and the others had
their grace to say why they failed too.
"""

import os
import signal
import socket
import time
import traceback

from fcdp_lab import launch, namespaces, network
from fcdp_lab.sandbox import send


def run(plan, events_fd):
    """Never returns."""
    code = 1
    try:
        namespaces.mount_private()
        code = _Engine(plan, events_fd).run()
    except (network.NetworkError, OSError) as error:
        send(events_fd, kind="broken", message=str(error))
    except BaseException:
        send(events_fd, kind="broken", message=traceback.format_exc())
    os._exit(code)


class _Engine:
    def __init__(self, plan, events_fd):
        self._plan = plan
        self._events_fd = events_fd
        self._nodes = {}  # pid -> node, those that run

    def run(self):
        network.create_switch()
        starts = [self._create_node(k) for k in range(self._plan["nodes"])]
        for start in starts:
            start.ready()
        send(self._events_fd, kind="up")
        for start in starts:
            start.go()
        code = self._wait_for_nodes()
        send(self._events_fd, kind="done")
        return code

    def _create_node(self, node):
        steps = _Steps()
        pid = os.fork()
        if pid == 0:
            _node_main(node, self._plan, steps.as_child(), self._events_fd)
        steps.as_parent()
        steps.ready()
        network.connect_node(node, pid, self._plan["rate_bits"])
        steps.go()
        self._nodes[pid] = node
        return steps

    def _wait_for_nodes(self):
        code, deadline = 0, None
        while self._nodes:
            if deadline is not None and time.monotonic() > deadline:
                return code
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                left = 1.0 if deadline is None else max(0.0, deadline - time.monotonic())
                signal.sigtimedwait({signal.SIGCHLD}, left)
                continue
            if pid not in self._nodes:
                continue
            node, exit_code = self._nodes.pop(pid), os.waitstatus_to_exitcode(status)
            if exit_code != 0 and deadline is None:
                code, deadline = 1, time.monotonic() + self._plan["grace_s"]
            if exit_code < 0:
                send(self._events_fd, kind="node_exit", node=node, code=exit_code, sent=None, received=None)
        return code


class _Steps:
    """A node and process 1 take turns: the child says ready, the parent says go."""

    def __init__(self):
        self._child, self._parent = os.pipe(), os.pipe()

    def as_child(self):
        os.close(self._parent[1])
        os.close(self._child[0])
        return self

    def as_parent(self):
        os.close(self._parent[0])
        os.close(self._child[1])

    def ready(self):
        if not os.read(self._child[0], 1):
            raise network.NetworkError("a node's process ended while its network was being built")

    def go(self):
        os.write(self._parent[1], b"g")

    def say_ready_and_wait(self):
        os.write(self._child[1], b"r")
        if not os.read(self._parent[0], 1):
            os._exit(1)


def _node_main(node, plan, steps, events_fd):
    """The process that is a node: holds its namespaces, runs the launcher in them. Never returns."""
    code = 1
    try:
        # The ranks inherit what is blocked: by the guard, and by the lab around the guard's start.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGTERM})
        namespaces.unshare(
            namespaces.CLONE_NEWNET | namespaces.CLONE_NEWNS | namespaces.CLONE_NEWUTS | namespaces.CLONE_NEWIPC
        )
        steps.say_ready_and_wait()
        _become_node(node, plan)
        steps.say_ready_and_wait()
        code = launch.run(node, plan)
        sent, received = network.read_counters()
        send(events_fd, kind="node_exit", node=node, code=code, sent=sent, received=received)
    except (network.NetworkError, OSError) as error:
        send(events_fd, kind="broken", message=f"node {node}: {error}")
    except BaseException:
        send(events_fd, kind="broken", message=traceback.format_exc())
    os._exit(1 if code else 0)


def _become_node(node, plan):
    socket.sethostname(network.node_name(node))
    namespaces.mount_private(node_hosts=plan["hosts_file"])
    network.bring_up_node(node, plan["rate_bits"], plan["delay_s"])
