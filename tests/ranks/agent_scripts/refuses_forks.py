"""Import this in the zygote: the kernel refuses the forks whose numbers ``REFUSED_FORKS`` says, as "4" or "4-9"."""

import errno
import itertools
import os

_first, _, _last = os.environ["REFUSED_FORKS"].partition("-")
_refused = range(int(_first), int(_last or _first) + 1)
_fork, _count, _zygote = os.fork, itertools.count(1), os.getpid()


def fork() -> int:
    if os.getpid() == _zygote and next(_count) in _refused:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return _fork()


os.fork = fork
