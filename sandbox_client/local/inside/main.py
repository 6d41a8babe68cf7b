"""Process 1 of a local sandbox: runs inside it, on the standard library alone, and is trusted by nobody.

It accepts connections on a listening Unix socket that it inherits (the socket's path is not visible inside).
Every connection carries one request (see `frames`) and is served by a forked child, so that a stuck request blocks
no other. When the client of an exec goes away, the command and its descendants are killed.
"""

import contextlib
import errno
import json
import os
import resource
import select
import signal
import socket
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # started with -I, which leaves it out

import commands
import files
from frames import receive, send_json

PR_SET_DUMPABLE, PR_CAPBSET_DROP = 4, 24


def op_ping(conn, request):
    send_json(conn, b"J", {"pid": os.getpid()})


OPS = {
    "exec": commands.op_exec,
    "read": files.op_read,
    "write": files.op_write,
    "list": files.op_list,
    "stat": files.op_stat,
    "move": files.op_move,
    "remove": files.op_remove,
    "mkdir": files.op_mkdir,
    "save": files.op_save,
    "load": files.op_load,
    "ping": op_ping,
}


def handle(conn):
    try:
        kind, payload = receive(conn)
        request = json.loads(payload)
        OPS[request["op"]](conn, request)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except Exception as error:  # becomes the client's typed error
        kind = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
        with contextlib.suppress(OSError):
            conn.setblocking(True)
            said = str(error)
            if isinstance(error, OSError) and error.filename:
                said = f"{error.strerror}: {error.filename}"
            send_json(conn, b"F", {"kind": kind, "message": said})


def become_user(config):
    """Give up everything that root had. Order matters: groups before the user, dumpable last."""
    for number, limit in config["rlimits"].items():
        resource.setrlimit(int(number), (limit, limit))
    if config["uid"] is not None:
        for folder in config["writable"]:
            os.chown(folder, config["uid"], config["uid"])
        for capability in range(64):
            commands.LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        os.setgroups([])
        os.setresgid(config["uid"], config["uid"], config["uid"])
        os.setresuid(config["uid"], config["uid"], config["uid"])
        header = struct.pack("<Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
        commands.LIBC.capset(header, b"\0" * 24)
    commands.LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the user's code, of the same uid, may not look into us


def main():
    config = json.loads(sys.argv[1])
    become_user(config)
    if os.getpid() != 1:  # without isolation
        commands.LIBC.prctl(commands.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    listener = socket.socket(fileno=config["listener"])
    lifeline = config["lifeline"]
    for fd in (listener.fileno(), lifeline):
        os.set_inheritable(fd, False)
    os.environ.clear()
    os.environ["HOME"] = config["home"]
    os.chdir(config["home"])
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    os.set_blocking(wake_r, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    poll = select.poll()
    for fd in (listener.fileno(), lifeline, wake_r):
        poll.register(fd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if lifeline in ready:  # the process that owns this sandbox is gone
            os._exit(0)
        if wake_r in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_r, 4096)
            commands.reap(None)
        if listener.fileno() in ready:
            conn, _ = listener.accept()
            serve_in_child(listener, conn, lifeline, (wake_r, wake_w))


def serve_in_child(listener, conn, lifeline, wakes):
    try:
        pid = os.fork()
    except OSError as error:  # the user's processes fill the limit
        with contextlib.suppress(OSError):
            send_json(
                conn,
                b"F",
                {
                    "kind": errno.errorcode.get(error.errno or 0, "OSError"),
                    "message": "the sandbox's process limit is reached",
                },
            )
        conn.close()
        return
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listener.close()
        for fd in (lifeline, *wakes):
            os.close(fd)
        try:
            handle(conn)
        finally:
            os._exit(0)
    conn.close()


main()
