"""Is the file that a study is to live in a study at all?"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from curvedp.errors import StorageError

__all__ = ["refuse_foreign_file"]

#: What every study has.
_WHOLE = {"studies", "trials", "version_info"}
#: Columns of the table that optuna makes first.
_FIRST = {"study_id", "study_name"}
#: Tables that optuna makes one after the other: a process that is killed meanwhile
#: leaves some of them, and the next one makes the others.
_BEGUN = {
    *_WHOLE,
    "alembic_version",
    *(f"study_{part}" for part in (
        "directions", "user_attributes", "system_attributes",
    )),
    *(f"trial_{part}" for part in (
        "user_attributes", "system_attributes", "params", "values",
        "intermediate_values", "heartbeats",
    )),
}  # fmt: skip


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
            columns = database.execute("pragma table_info(studies)").fetchall()
    except sqlite3.OperationalError:
        return  # in use at this moment, or unreadable, which optuna will say
    except sqlite3.DatabaseError as error:
        raise StorageError(
            f"{file} is not a database: {error}", "choose another --storage"
        ) from error
    found = {name for (name,) in listed}
    is_begun = found <= _BEGUN and {c[1] for c in columns} == _FIRST
    if found and not (found >= _WHOLE or is_begun):
        raise StorageError(
            f"{file} is a database of something else", "choose another --storage"
        )
