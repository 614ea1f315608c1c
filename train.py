"""The door for `torchrun train.py --job.config_file CONFIG [--section.key value ...]`."""

if __name__ == "__main__":
    from meshwright.train.__main__ import start

    start()
