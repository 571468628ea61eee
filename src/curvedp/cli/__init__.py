"""The command line: ``curvedp --help``.

typer and rich are imported when the command runs, so that the library works without
them.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.stderr.write(
            f"error: the command line needs the package {error.name!r}, which is not "
            "installed\n  -> pip install 'curvedp[cli]'\n"
        )
        return 2
    try:
        from curvedp.cli.app import app  # takes seconds, in which Ctrl-C may come
    except KeyboardInterrupt:
        return 130
    app(prog_name="curvedp")
    return 0
