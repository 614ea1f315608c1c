"""The search of `meshwright plan --search` beside a simulation of every candidate of a small space.

    python -m benchmarks.plan_search

Prints how far below its simulation each candidate's floor is, and for several limits of memory the
best candidate by search and by simulating all.
"""

from concurrent.futures import Future
from dataclasses import replace

from meshwright.commands.plan.candidates import Choice, legal
from meshwright.commands.plan.devices import GIB, find_device
from meshwright.commands.plan.predict import Figures, predict_config, processes
from meshwright.commands.plan.rates import assumed
from meshwright.commands.plan.search import Board, find_floors, fits_in
from meshwright.config.loader import load_config

RANKS = 4
CONFIG = [
    "--job.config_file=train_configs/debug_model.toml",
    "--training.mixed_precision_param=bfloat16",
    "--training.seq_len=1024",
    "--training.local_batch_size=1",
    "--training.global_batch_size=8",
    "--model.args.dim=2048",
    "--model.args.n_layers=4",
    "--model.args.n_heads=16",
    "--model.args.n_kv_heads=8",
    "--model.args.vocab_size=32768",
    "--compile.enable=false",  # so that schedules that split backward are searched, too
]
LIMITS = (2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 80)
"""GiB of the device."""


def main() -> None:
    config = load_config(CONFIG)
    device = find_device("h100")
    rates = assumed(device)
    assert rates is not None
    plans = dict(legal(config, RANKS, device))
    with processes(2) as pool:
        floors = find_floors(config, plans, device, rates[1], pool)
        calls: dict[Choice, list[Future[Figures]]] = {}
        for choice, plan in plans.items():
            ends = sorted({0, RANKS - RANKS // plan.dims.pp})
            tasks = [(plan.config, RANKS, rank, device, rates[1]) for rank in ends]
            calls[choice] = [pool.submit(predict_config, *task) for task in tasks]
        figures = {}
        for choice, ends in calls.items():
            found = [call.result() for call in ends]
            most = max(found, key=lambda one: one.rounded_bytes)
            one = replace(most, seconds=max(end.seconds for end in found))
            figures[choice], floor = one, floors[choice]
            print(
                f"{floor.seconds / one.seconds:.3f} of {one.seconds:.3f} s, "
                f"{floor.num_bytes / one.peak_bytes:.3f} of {one.peak_bytes / GIB:.2f} GiB: "
                f"{choice.words}",
                flush=True,
            )
    for gib in LIMITS:
        limited = replace(device, memory_gib=float(gib))
        board = Board(plans, floors, limited)
        while (choice := board.next()) is not None:
            board.note(choice, figures[choice])
        every = [c for c in plans if fits_in(figures[c], plans[c], limited)]
        best = min((figures[c].seconds for c in every), default=None)
        ranked = board.ranked()
        by_search = ranked[0].figures.seconds if ranked else None
        print(
            f"{gib} GiB: {len(every)} of {len(plans)} fit, {board.num_too_large} too large by "
            f"floor, {len(board.found)} simulated; best {best} s, by search {by_search} s"
        )
        assert best == by_search


if __name__ == "__main__":
    main()
