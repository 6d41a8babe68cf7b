"""Process 1 of a local sandbox: runs inside it, on the standard library alone, and is trusted by nobody.

It accepts connections on a listening Unix socket that it inherits (the socket's path is not visible inside).
Every connection carries one request and is served by a forked child, so that a stuck request blocks no other.
A frame is a type byte, a 4-byte big-endian length and a payload; a request is one JSON frame ``Q``.

Frames back: ``J`` the JSON answer, ``F`` a JSON error {"kind", "message"}, ``D`` data, ``Z`` end of data, and
for exec ``S`` {"pid"}, ``O`` stdout, ``E`` stderr, ``X`` {"exit_code", "timed_out"}. Frames to an exec: ``I``
stdin, ``C`` close stdin, ``K`` signal. When the client of an exec goes away, the command and its descendants
are killed.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time

HEADER = struct.Struct("!cI")
MAX_FRAME = 8 * 1024 * 1024
PIECE = 64 * 1024
BUFFER = 1024 * 1024
PAUSE_GAP_S = 1.0  # a longer gap between two looks at the clock means that the sandbox was paused
LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 4, 24, 36


# ------------------------------------------------------------------ frames


def send(conn, kind, payload=b""):
    conn.sendall(HEADER.pack(kind, len(payload)) + payload)


def send_json(conn, kind, value):
    send(conn, kind, json.dumps(value).encode("utf-8", "surrogateescape"))


def receive_exactly(conn, size):
    data = bytearray()
    while len(data) < size:
        piece = conn.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def receive(conn):
    kind, size = HEADER.unpack(receive_exactly(conn, HEADER.size))
    if size > MAX_FRAME:
        raise ValueError("frame too long")
    return kind, receive_exactly(conn, size)


class FrameWriter:
    """A file that sends what is written as ``D`` frames."""

    def __init__(self, conn):
        self.conn = conn

    def write(self, data):
        for start in range(0, len(data), BUFFER):
            send(self.conn, b"D", bytes(data[start : start + BUFFER]))
        return len(data)


class FrameReader:
    """A file that reads the ``D`` frames up to ``Z``."""

    def __init__(self, conn):
        self.conn, self.rest, self.ended = conn, b"", False

    def read(self, size=-1):
        while not self.ended and (size < 0 or len(self.rest) < size):
            kind, payload = receive(self.conn)
            if kind == b"Z":
                self.ended = True
            else:
                self.rest += payload
        size = len(self.rest) if size < 0 else size
        data, self.rest = self.rest[:size], self.rest[size:]
        return data


# ------------------------------------------------------------------ exec


def descendants(root):
    """Pids below ``root``, orphans included: their subreaper is the handler, so they stay its descendants."""
    children = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rsplit(b")", 1)[1].split()
                if fields[0] != b"Z":
                    children.setdefault(int(fields[1]), []).append(int(name))
    found, queue = [], [root]
    while queue:
        for pid in children.get(queue.pop(), []):
            found.append(pid)
            queue.append(pid)
    return found


def kill_tree():
    """Stop first, so that a forking crowd cannot outrun the killer; repeat until none is left."""
    for _ in range(200):
        pids = descendants(os.getpid())
        if not pids:
            return
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
        reap(None)
        time.sleep(0.001)


def reap(main_pid):
    """Collect dead children; the main one's exit code if it was among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == main_pid:
            code = os.waitstatus_to_exitcode(status)
            code = 128 - code if code < 0 else code


def become(request, fds, failure):
    """In the forked child: turn into the command. Never returns."""
    try:
        os.setsid()
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        os.dup2(failure, 3)
        os.set_inheritable(3, False)
        os.closerange(4, 65536)
        for number in (signal.SIGPIPE, signal.SIGCHLD, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")  # before the init
        resource.setrlimit(resource.RLIMIT_NPROC, (request["processes"], request["processes"]))
        cwd = request.get("cwd") or request["env"]["HOME"]
        os.chdir(cwd)
        os.umask(0o022)
        os.execvpe(request["argv"][0], request["argv"], request["env"])
    except BaseException as error:
        number = getattr(error, "errno", None) or 0
        os.write(3, json.dumps([number, os.strerror(number) if number else repr(error)]).encode())
    os._exit(127)


def spawn(request):
    """-> pid, stdin write end or None, stdout read end, stderr read end. Raises OSError if it cannot
    start."""
    out_r, out_w = os.pipe()
    err_r, err_w = os.pipe()
    fail_r, fail_w = os.pipe()
    in_r, in_w = os.pipe() if request["stdin"] else (os.open("/dev/null", os.O_RDONLY), None)
    pid = os.fork()
    if pid == 0:
        # Moved out of the way first, or dup2 would overwrite a source before its turn.
        import fcntl

        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 16) for fd in (in_r, out_w, err_w, fail_w)]
        become(request, high[:3], high[3])
    for fd in (in_r, out_w, err_w, fail_w):
        os.close(fd)
    with os.fdopen(fail_r, "rb") as file:
        failed = file.read()
    if failed:
        os.waitpid(pid, 0)
        number, message = json.loads(failed)
        raise OSError(number, message)
    return pid, in_w, out_r, err_r


class Exec:
    """One command: moves bytes between its pipes and the client in bounded buffers, and keeps its time."""

    GRACE_S = 0.25  # after the command's end, for output that background children still hold

    def __init__(self, conn, request):
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.conn, self.left_s = conn, float(request["timeout_s"])
        self.pid, self.stdin, self.stdout, self.stderr = spawn(request)
        self.to_client, self.to_stdin, self.from_client = bytearray(), bytearray(), bytearray()
        self.close_stdin = False
        self.code, self.timed_out, self.quiet_since, self.ended_at = None, False, 0.0, 0.0
        self.frame_json(b"S", {"pid": self.pid})
        for fd in (self.stdin, self.stdout, self.stderr):
            if fd is not None:
                os.set_blocking(fd, False)
        conn.setblocking(False)

    def frame_json(self, kind, value):
        payload = json.dumps(value).encode()
        self.to_client += HEADER.pack(kind, len(payload)) + payload

    def run(self):
        wake_r, wake_w = os.pipe()
        os.set_blocking(wake_w, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        clock = time.monotonic()
        while not self.finished():
            events = self.wait(wake_r)
            now = time.monotonic()
            self.left_s -= min(now - clock, PAUSE_GAP_S)
            clock = now
            self.serve(events, wake_r)
            code = reap(self.pid)
            if code is not None:
                self.code, self.ended_at = code, now
            if self.code is None and self.left_s <= 0:
                self.timed_out = True
                kill_tree()
                self.code, self.ended_at = 137, now
        self.frame_json(b"X", {"exit_code": self.code, "timed_out": self.timed_out})
        self.conn.settimeout(10)
        self.conn.sendall(self.to_client)

    def finished(self):
        if self.code is None:
            return False
        if self.stdout is None and self.stderr is None:
            return True
        # Something still holds the pipes: background children. Take what lies there, then leave them alone.
        return time.monotonic() - self.ended_at > self.GRACE_S

    def wait(self, wake_r):
        poll = select.poll()
        poll.register(wake_r, select.POLLIN)
        mask = select.POLLRDHUP
        if len(self.to_stdin) < BUFFER:
            mask |= select.POLLIN
        if self.to_client:
            mask |= select.POLLOUT
        poll.register(self.conn, mask)
        if len(self.to_client) < BUFFER:
            for fd in (self.stdout, self.stderr):
                if fd is not None:
                    poll.register(fd, select.POLLIN)
        if self.stdin is not None and (self.to_stdin or self.close_stdin):
            poll.register(self.stdin, select.POLLOUT)
        limit_s = 0.02 if self.code is not None else max(min(self.left_s, PAUSE_GAP_S / 2), 0)
        return dict(poll.poll(limit_s * 1000))

    def serve(self, events, wake_r):
        if wake_r in events:
            os.read(wake_r, 4096)
        for name, kind in (("stdout", b"O"), ("stderr", b"E")):
            fd = getattr(self, name)
            if fd in events:
                data = os.read(fd, PIECE)
                if data:
                    self.to_client += HEADER.pack(kind, len(data)) + data
                else:
                    os.close(fd)
                    setattr(self, name, None)
        if self.stdin in events:
            self.pump_stdin()
        seen = events.get(self.conn.fileno(), 0)
        if seen & select.POLLOUT and self.to_client:
            with contextlib.suppress(BlockingIOError):
                del self.to_client[: self.conn.send(self.to_client[:BUFFER])]
        if seen & ~select.POLLOUT:
            self.hear()

    def pump_stdin(self):
        try:
            if self.to_stdin:
                del self.to_stdin[: os.write(self.stdin, self.to_stdin[:PIECE])]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.to_stdin.clear()
            self.close_stdin = True
        if self.close_stdin and not self.to_stdin:
            os.close(self.stdin)
            self.stdin = None

    def hear(self):
        try:
            data = self.conn.recv(PIECE)
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        self.from_client += data
        while len(self.from_client) >= HEADER.size:
            kind, size = HEADER.unpack(self.from_client[: HEADER.size])
            if size > MAX_FRAME:
                raise EOFError
            if len(self.from_client) < HEADER.size + size:
                return
            payload = bytes(self.from_client[HEADER.size : HEADER.size + size])
            del self.from_client[: HEADER.size + size]
            if kind == b"I" and self.stdin is not None:
                self.to_stdin += payload
            elif kind == b"C":
                self.close_stdin = True
            elif kind == b"K" and self.code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, int(payload))


def op_exec(conn, request):
    run = Exec(conn, request)
    try:
        run.run()
        linger(conn)
    except (EOFError, OSError):  # the client is gone
        kill_tree()


def linger(conn, limit_s=2.0):
    """Read what the client still sends, such as input nobody wants: closing a socket with unread bytes in it would
    throw away the answer that the client has not read yet."""
    conn.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + limit_s
    poll = select.poll()
    poll.register(conn, select.POLLIN)
    while (left_s := deadline - time.monotonic()) > 0 and poll.poll(left_s * 1000):
        if not conn.recv(PIECE):
            return


# ------------------------------------------------------------------ files


def resolve(path):
    return os.path.normpath(os.path.join(os.environ["HOME"], path))


def entry(path):
    found = os.lstat(path)
    mode = found.st_mode
    kind = (
        "file"
        if stat.S_ISREG(mode)
        else "directory"
        if stat.S_ISDIR(mode)
        else "symlink"
        if stat.S_ISLNK(mode)
        else "other"
    )
    return {
        "name": os.path.basename(path.rstrip("/")) or "/",
        "path": path,
        "type": kind,
        "size": found.st_size,
        "mode": stat.S_IMODE(mode),
        "modified": found.st_mtime,
        "target": os.readlink(path) if kind == "symlink" else "",
    }


def op_read(conn, request):
    path = resolve(request["path"])
    # Opened without blocking, or a FIFO would hold the handler for ever.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, "is a directory", path)
        if not stat.S_ISREG(found.st_mode) and not path.startswith("/proc/"):
            raise OSError(errno.EINVAL, "not a regular file", path)
        left = request["limit"] + 1
        while left > 0 and (data := file.read(min(PIECE * 4, left))):
            send(conn, b"D", data)
            left -= len(data)
    send(conn, b"Z")


def op_write(conn, request):
    path = resolve(request["path"])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    source = FrameReader(conn)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644)
    with os.fdopen(fd, "wb") as file:
        if request.get("mode") is not None:
            os.fchmod(fd, request["mode"])
        while data := source.read(PIECE * 4):
            file.write(data)
    send_json(conn, b"J", entry(path))


def op_list(conn, request):
    top = resolve(request["path"]).rstrip("/") or "/"
    found, level = [], [top]
    if not os.path.isdir(top):
        os.stat(top)
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", top)
    for _ in range(max(request["depth"], 1)):
        deeper = []
        for folder in level:
            for name in sorted(os.listdir(folder)):
                path = os.path.join(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    found.append(entry(path))
                    if found[-1]["type"] == "directory" and os.access(path, os.R_OK | os.X_OK):
                        deeper.append(path)
        level = deeper
    send_json(conn, b"J", found[: request["limit"]])


def op_stat(conn, request):
    send_json(conn, b"J", entry(resolve(request["path"])))


def op_move(conn, request):
    import shutil

    source, destination = resolve(request["source"]), resolve(request["destination"])
    os.lstat(source)
    os.makedirs(os.path.dirname(destination), exist_ok=True)
    try:
        os.rename(source, destination)
    except OSError as error:
        if error.errno != errno.EXDEV:  # home and /tmp are two file systems
            raise
        shutil.move(source, destination)
    send_json(conn, b"J", entry(destination))


def op_remove(conn, request):
    import shutil

    path = resolve(request["path"])
    if stat.S_ISDIR(os.lstat(path).st_mode):
        shutil.rmtree(path)
    else:
        os.unlink(path)
    send_json(conn, b"J", {})


def op_mkdir(conn, request):
    path = resolve(request["path"])
    os.makedirs(path, exist_ok=True)
    send_json(conn, b"J", entry(path))


def op_save(conn, request):
    """Stream the folders as one tar; names begin with the folder's key, so that they can land elsewhere."""
    import tarfile

    with tarfile.open(fileobj=FrameWriter(conn), mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for key, top in request["folders"].items():
            for folder, names, files in os.walk(top, onerror=fail):
                for name in sorted(names) + sorted(files):
                    path = os.path.join(folder, name)
                    info = tar.gettarinfo(path, arcname=key + path[len(top) :])
                    if info is None:  # a socket
                        continue
                    info.uid = info.gid = 0
                    info.uname = info.gname = ""
                    if info.isreg():
                        with open(path, "rb") as file:
                            tar.addfile(info, file)
                    elif info.isdir() or info.issym() or info.islnk() or info.isfifo():
                        tar.addfile(info)
    send(conn, b"Z")


def fail(error):
    raise error


def op_load(conn, request):
    import tarfile

    def moved(name):
        key, _, rest = name.partition("/")
        return os.path.join(request["folders"][key], rest).lstrip("/")

    def members(tar):
        for member in tar:
            member.name = moved(member.name)
            if member.islnk():
                member.linkname = moved(member.linkname)
            yield member

    with tarfile.open(fileobj=FrameReader(conn), mode="r|") as tar:
        keep = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
        tar.extractall("/", members(tar), **keep)  # as the sandbox's user, inside the sandbox
    send_json(conn, b"J", {})


def op_ping(conn, request):
    send_json(conn, b"J", {"pid": os.getpid()})


OPS = {
    "exec": op_exec,
    "read": op_read,
    "write": op_write,
    "list": op_list,
    "stat": op_stat,
    "move": op_move,
    "remove": op_remove,
    "mkdir": op_mkdir,
    "save": op_save,
    "load": op_load,
    "ping": op_ping,
}


# ------------------------------------------------------------------ process 1


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
            said = f"{error.strerror}: {error.filename}" if getattr(error, "filename", None) else str(error)
            send_json(conn, b"F", {"kind": kind, "message": said})


def become_user(config):
    """Give up everything that root had. Order matters: groups before the user, dumpable last."""
    for number, limit in config["rlimits"].items():
        resource.setrlimit(int(number), (limit, limit))
    if config["uid"] is not None:
        for folder in config["writable"]:
            os.chown(folder, config["uid"], config["uid"])
        for capability in range(64):
            LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        os.setgroups([])
        os.setresgid(config["uid"], config["uid"], config["uid"])
        os.setresuid(config["uid"], config["uid"], config["uid"])
        header = struct.pack("<Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
        LIBC.capset(header, b"\0" * 24)
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the user's code, of the same uid, may not look into us


def main():
    config = json.loads(sys.argv[1])
    become_user(config)
    if os.getpid() != 1:  # without isolation
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
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
            reap(None)
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
                    "kind": errno.errorcode.get(error.errno, "OSError"),
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
