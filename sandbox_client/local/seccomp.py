"""A seccomp filter as classic BPF, built here so that no libseccomp is needed.

A deny list: what a sandboxed program never needs and what has been a way out of containers before. Denied
calls fail with EPERM, so that programs report an error instead of dying. ``clone3`` fails with ENOSYS because
its flags lie in memory where a filter cannot read them; every libc then falls back to ``clone``.
"""

from __future__ import annotations

import platform
import struct

_EPERM, _ENOSYS = 1, 38
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = (
    0x20,
    0x15,
    0x35,
    0x45,
    0x06,
)  # BPF_LD|W|ABS, BPF_JMP|..|K, BPF_RET|K
_NR, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24  # offsets in struct seccomp_data (low words, little endian)

_NEW_NAMESPACES = 0x7E020000 | 0x00000080  # CLONE_NEW{CGROUP,UTS,IPC,USER,PID,NET,NS} and NEWTIME
_FORBIDDEN_FAMILIES = (38, 40, 17, 44, 21)  # AF_ALG, AF_VSOCK (no namespaces), AF_PACKET, AF_XDP, AF_RDS
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # type into the controlling terminal

# name: (x86_64, aarch64)
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "personality": (135, 92),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "fanotify_init": (300, 262),
    "mbind": (237, 235),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "set_mempolicy": (238, 237),
}
_SPECIAL = {"clone": (56, 220), "clone3": (435, 435), "socket": (41, 198), "ioctl": (16, 29)}
_ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def _op(code: int, k: int, jt: int = 0, jf: int = 0) -> bytes:
    return struct.pack("<HBBI", code, jt, jf, k)


def supported() -> bool:
    return platform.machine() in _ARCHES


def program() -> bytes:
    """The filter, as ``bwrap --seccomp`` reads it: an array of ``struct sock_filter``.

    Raises `RuntimeError` on machines other than x86_64 and aarch64.
    """
    machine = platform.machine()
    if machine not in _ARCHES:
        raise RuntimeError(f"no seccomp table for {machine}")
    column, arch = _ARCHES[machine]
    deny = _op(_RETURN, _ERRNO | _EPERM)
    ops = [_op(_LOAD, _ARCH), _op(_JUMP_EQ, arch, 1, 0), _op(_RETURN, _KILL), _op(_LOAD, _NR)]
    if machine == "x86_64":  # the x32 table reaches the same calls by other numbers
        ops += [_op(_JUMP_GE, 0x40000000, 0, 1), _op(_RETURN, _ERRNO | _ENOSYS)]
    ops += [_op(_JUMP_EQ, _SPECIAL["clone3"][column], 0, 1), _op(_RETURN, _ERRNO | _ENOSYS)]
    for numbers in _DENIED.values():
        number = numbers[column]
        if number is not None:
            ops += [_op(_JUMP_EQ, number, 0, 1), deny]
    # Each block below tests one call, looks at an argument, and reloads the number for the next.
    ops += [
        _op(_JUMP_EQ, _SPECIAL["clone"][column], 0, 4),
        _op(_LOAD, _ARG0),
        _op(_JUMP_SET, _NEW_NAMESPACES & ~0xFF, 0, 1),  # the low byte of clone's flags is the exit signal
        deny,
        _op(_LOAD, _NR),
        _op(_JUMP_EQ, _SPECIAL["socket"][column], 0, 2 + 2 * len(_FORBIDDEN_FAMILIES)),
        _op(_LOAD, _ARG0),
    ]
    for family in _FORBIDDEN_FAMILIES:
        ops += [_op(_JUMP_EQ, family, 0, 1), deny]
    ops += [_op(_LOAD, _NR), _op(_JUMP_EQ, _SPECIAL["ioctl"][column], 0, 5), _op(_LOAD, _ARG1)]
    for request in (_TIOCSTI, _TIOCLINUX):
        ops += [_op(_JUMP_EQ, request, 0, 1), deny]
    ops.append(_op(_RETURN, _ALLOW))
    return b"".join(ops)
