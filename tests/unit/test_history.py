"""The record of a job's processes."""

import json

from meshwright.metrics import history
from tests.helpers.files import no_room


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


def test_a_job_that_starts_over_keeps_the_figures_of_the_run_before(tmp_path, caplog) -> None:
    caplog.set_level("INFO", "meshwright")
    (tmp_path / "metrics.jsonl").touch()
    history.set_aside(tmp_path)  # it was killed before its first step
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    for number in (1, 2):
        for name in ("metrics.jsonl", "config.toml"):
            (tmp_path / name).write_text(f"{number}")
        history.set_aside(tmp_path)
    earlier = [tmp_path / f"earlier_run_{number}" for number in (1, 2)]
    assert sorted(tmp_path.iterdir()) == earlier
    for name in ("metrics.jsonl", "config.toml"):
        assert [(folder / name).read_text() for folder in earlier] == ["1", "2"]
    assert caplog.messages == [f"the earlier run's metrics are now in {path}" for path in earlier]


def test_a_full_disk_is_a_warning(tmp_path, caplog) -> None:
    history.note(tmp_path / "not there", 3, "end", {})
    assert "history.jsonl cannot be written" in caplog.text
    history.note(tmp_path, 3, "start", {})
    before = (tmp_path / "history.jsonl").read_text()
    with no_room(len(before) + 10):  # of the next line the beginning would fit
        history.note(tmp_path, 4, "end", {})
    assert (tmp_path / "history.jsonl").read_text() == before
    assert caplog.text.count("history.jsonl cannot be written") == 2


def test_the_end_of_a_process_that_could_not_note_it_is_added_once(tmp_path, monkeypatch) -> None:
    since = 1000.04  # a file has tenths of seconds, so a start may look older than it is
    monkeypatch.setattr(history.time, "time", lambda: since)
    history.note_missing_end(tmp_path, 3, "killed before it began", since)
    assert not (tmp_path / "history.jsonl").exists()
    history.note(tmp_path, 0, "start", {})
    history.note_missing_end(tmp_path, 3, "killed before it began", since + 100)
    for _ in range(2):
        history.note_missing_end(tmp_path, 7, "hung", since)
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["event"], row["step"]) for row in rows] == [("start", 0), ("end", 7)]
    assert rows[1]["reason"] == "hung"
