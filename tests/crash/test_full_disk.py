"""A disk that fills up or turns read-only under the command line."""

import json

import pytest

from tests.crash.runs import check_account, end, start, train_flags

pytestmark = pytest.mark.fault


def test_a_full_and_a_read_only_disk_stop_the_run_which_then_finishes(blobs, tmp_path):
    draws = str(tmp_path / "draws")
    flags = train_flags(blobs, 40)
    full = ["ENOSPC", ["write", "fsync"], 60]
    code, output, message = end(start(tmp_path, *flags, draws=draws, fail=full))
    assert code == 2 and output == ""
    assert "No space left on device" in message and "Traceback" not in message
    assert "free some space" in message

    paid, *_ = check_account(tmp_path, 40, kills=1)
    assert 0 < paid.count() < 40
    locked = ["EROFS", ["write", "fsync", "replace"], 60]
    resume = ("resume", "run", "--json")
    code, output, message = end(start(tmp_path, *resume, draws=draws, fail=locked))
    assert code == 2 and output == ""
    assert "Read-only file system" in message and "Traceback" not in message
    more, *_ = check_account(tmp_path, 40, kills=2)
    assert paid.count() < more.count() < 40

    code, output, message = end(start(tmp_path, *resume, draws=draws))
    assert code == 0, message
    assert json.loads(output)["finished"]
    record, *_ = check_account(tmp_path, 40, kills=2)
    assert record.count() == 40
