"""Is the file that a study is to live in a study at all?"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from curvedp.errors import StorageError

__all__ = ["refuse_foreign_file"]


def refuse_foreign_file(url: str) -> None:
    """Refuse a database of something else, before optuna adds its tables to it."""
    file = Path(url.removeprefix("sqlite:///").partition("?")[0])
    if (
        not url.startswith("sqlite:///")
        or not file.is_file()
        or not file.stat().st_size
    ):
        return
    try:
        with contextlib.closing(
            sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)
        ) as database:
            listed = database.execute(
                "select name from sqlite_master where type = 'table' limit 1000"
            ).fetchall()
    except sqlite3.OperationalError:
        return  # in use at this moment, or unreadable, which optuna will say
    except sqlite3.DatabaseError as error:
        raise StorageError(
            f"{file} is not a database: {error}", "choose another --storage"
        ) from error
    if listed and not {"studies", "trials", "version_info"} <= {n for (n,) in listed}:
        raise StorageError(
            f"{file} is a database of something else", "choose another --storage"
        )
