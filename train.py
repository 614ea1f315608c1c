"""The door for `torchrun train.py --job.config_file CONFIG [--section.key value ...]`."""

from meshwright.train import main

if __name__ == "__main__":
    main()
