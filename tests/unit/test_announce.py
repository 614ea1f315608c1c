"""The config on the console, in few lines."""

from meshwright.announce import compact_toml


def test_a_table_takes_a_line_and_a_long_one_is_broken_between_keys() -> None:
    text = '[job]\ndump_folder = "out"\nmax_run_seconds = 50\n\n[training]\n'
    text += "".join(f"a_long_key_number_{n} = {n}\n" for n in range(8))
    first, *others = compact_toml(text)
    assert first == '[job] dump_folder = "out", max_run_seconds = 50'
    assert len(others) == 3
    assert all(len(line) <= 88 for line in others)
    numbers = [item.split(" = ")[1].split()[0] for item in ", ".join(others).split(", ")]
    assert numbers == [str(n) for n in range(8)]


def test_values_of_every_kind_fit_into_their_line() -> None:
    text = """[training]
max_norm = inf
lr = 1e-3
deterministic = true
fp32_modules = [
    "output",
]
[[training.datasets]]
name = "ä"
weight = 0.5
"""
    assert compact_toml(text) == [
        '[training] max_norm = inf, lr = 0.001, deterministic = true, fp32_modules = ["output"]',
        '  datasets = [{name = "ä", weight = 0.5}]',
    ]
