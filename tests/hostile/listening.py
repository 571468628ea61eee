"""Everything that a call says, in whatever way, as one text to look through."""

import io
import logging
import re
import traceback
import warnings

TEXT = "zqmarker"
NUMBER = 987654321.25
#: The number as Python, float32, torch and numpy print it; the text also as bytes.
TRACES = re.compile(
    r"zqmark|9876543|9\.8765?[0-9]*e|9\.877e|122, *113|\[122 +113|7a716d61", re.I
)


def unfolded(error, seen=None):
    """An error with everything that hangs on it."""
    seen = set() if seen is None else seen
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield f"{error} {error!r} {error.args!r} {vars(error)!r}"
    yield getattr(error, "doc", "")
    yield repr(getattr(error, "object", ""))
    yield from getattr(error, "__notes__", ())
    yield "".join(traceback.format_exception(error))
    yield from (
        repr(value)
        for frame, _ in traceback.walk_tb(error.__traceback__)
        for value in frame.f_locals.values()
        if isinstance(value, BaseException)
    )
    yield from unfolded(error.__cause__, seen)
    yield from unfolded(error.__context__, seen)


def said(call, capfd):
    """What a call says, its processes too, and the error it ends with, if any."""
    found = None
    logged = io.StringIO()
    handler = logging.StreamHandler(logged)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    capfd.readouterr()
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                call()
            except BaseException as error:
                found = error
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    shown = [warnings.formatwarning(w.message, w.category, "", 0, "") for w in warned]
    texts = [*capfd.readouterr(), logged.getvalue(), *shown, *unfolded(found)]
    return "\n".join(texts), found


def assert_silent(text):
    trace = TRACES.search(text)
    if trace:
        near = text[max(0, trace.start() - 300) : trace.end() + 100]
        raise AssertionError(f"a private value is in the output: ...{near}...")
