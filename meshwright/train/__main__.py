"""One rank: python -m meshwright.train --job.config_file CONFIG [--section.key value ...]"""

if __name__ == "__main__":
    # not above: processes that tokenise read this file too, and need no torch
    from meshwright.system.modules import uncollected
    from meshwright.system.processes import Requests

    with Requests("exit") as requests:
        with uncollected():
            from meshwright.train.main import main
        main(requests)
