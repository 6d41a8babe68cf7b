"""Commands inside a sandbox: one handler process for each, which moves bytes, keeps the time and kills."""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import time

from frames import BUFFER, HEADER, MAX_FRAME, PIECE

PAUSE_GAP_S = 1.0  # a longer gap between two looks at the clock means that the sandbox was paused
LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_CHILD_SUBREAPER = 36


def descendants(root):
    """Pids below ``root``, orphans included: their subreaper is the handler, so they stay its descendants."""
    children: dict[int, list[int]] = {}
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
        for ignored in (signal.SIGPIPE, signal.SIGCHLD, signal.SIGXFSZ):
            signal.signal(ignored, signal.SIG_DFL)
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
        self.drain()
        self.frame_json(b"X", {"exit_code": self.code, "timed_out": self.timed_out})
        self.conn.settimeout(60)
        self.conn.sendall(self.to_client)

    def drain(self):
        """What was written before the end, and was not read because the client or the machine was slow."""
        for fd, kind in ((self.stdout, b"O"), (self.stderr, b"E")):
            left = BUFFER  # as much as a pipe can hold; a background child may go on writing
            with contextlib.suppress(BlockingIOError):
                while fd is not None and left > 0 and (data := os.read(fd, PIECE)):
                    self.to_client += HEADER.pack(kind, len(data)) + data
                    left -= len(data)

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
