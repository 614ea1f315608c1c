"""The record of a job's processes."""

import json

from meshwright.metrics import history


def test_a_resume_goes_on_with_the_history_and_a_new_job_begins_it_anew(tmp_path) -> None:
    def events() -> list:
        rows = map(json.loads, (tmp_path / "history.jsonl").read_text().splitlines())
        return [(row["event"], row["step"]) for row in rows]

    history.note(tmp_path, 0, "start", {"ranks": 2})
    history.note(tmp_path, 30, "end", {"reason": "stopped"})
    history.note(tmp_path, 20, "start", {"ranks": 4})
    assert events() == [("start", 0), ("end", 30), ("start", 20)]
    history.note(tmp_path, 0, "start", {"ranks": 2})
    assert events() == [("start", 0)]


def test_a_full_disk_is_a_warning(tmp_path, caplog) -> None:
    history.note(tmp_path / "not there", 3, "end", {})
    assert "history.jsonl cannot be written" in caplog.text
