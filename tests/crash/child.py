"""The command line in a process of its own, watched and broken on request.

``python child.py <options as JSON> <arguments of curvedp>``. Options: ``draws``, the
file that every draw of noise is written to; ``fail``: name of the error, the calls in
``os`` that raise it, and how many of them succeed before that; ``die``: the call in
``os`` in whose place the process is killed, and how many of them come before that.
"""

import errno
import json
import os
import signal
import sys

_write, _open = os.write, os.open


def watch_draws(path):
    """Write pid, step and attempt of every draw of noise, before it is drawn."""
    from curvedp.noise import RandomStreams, Stream

    original = RandomStreams.generator
    file = _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def generator(self, stream, *address):
        if stream is Stream.NOISE:
            # one address a tensor: (step, attempt, which tensor)
            line = json.dumps([os.getpid(), *address]) + "\n"
            _write(file, line.encode())
        return original(self, stream, *address)

    RandomStreams.generator = generator


def break_disk(name, calls, after):
    """Let the given calls fail for good, after so many of them."""
    number = getattr(errno, name)
    left = [after]

    def broken(original):
        def call(*args, **kwargs):
            if left[0] <= 0:
                raise OSError(number, os.strerror(number))
            left[0] -= 1
            return original(*args, **kwargs)

        return call

    for call in calls:
        setattr(os, call, broken(getattr(os, call)))


def die_at(name, after):
    """Be killed in place of a call, as by kill -9."""
    original, left = getattr(os, name), [after]

    def call(*args, **kwargs):
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return original(*args, **kwargs)

    setattr(os, name, call)


def main():
    options = json.loads(sys.argv.pop(1))
    from curvedp.cli import main as curvedp

    if "draws" in options:
        watch_draws(options["draws"])
    if "fail" in options:
        break_disk(*options["fail"])
    if "die" in options:
        die_at(*options["die"])
    return curvedp()


if __name__ == "__main__":
    sys.exit(main())
