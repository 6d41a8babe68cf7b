"""Files inside a sandbox, seen with the eyes of its user: nothing here needs to guard the sandbox against itself."""

import contextlib
import errno
import os
import stat

from frames import PIECE, FrameReader, FrameWriter, send, send_json


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
        if hasattr(tarfile, "fully_trusted_filter"):
            tar.extraction_filter = tarfile.fully_trusted_filter
        tar.extractall("/", members(tar))  # as the sandbox's user, inside the sandbox
    send_json(conn, b"J", {})
