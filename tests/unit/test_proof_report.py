"""The table of a proof on a console."""

from meshwright.proof.report import COLUMNS, line


def test_rows_fit_a_console_of_100_columns() -> None:
    row = ("mesh: dp_shard 2 x tp 2", *("1" * 7 for _ in COLUMNS[1:-1]), "FAILED")
    assert all(len(text) <= 100 for text in (line(COLUMNS), line(row)))
    assert line(row).startswith(row[0])
    assert line(row).endswith("FAILED")
    name = "InterleavedZeroBubble, reshard never: pp 2 x dp_shard 2"
    own_line, rest = line((name, *row[1:])).splitlines()
    assert own_line == name
    assert rest.split() == line(row).removeprefix(row[0]).split()
    assert rest.index("FAILED") == line(row).index("FAILED")
