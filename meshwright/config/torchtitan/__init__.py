"""TOMLs of torchtitan 0.2.2, read as configs of ours: `rules` as data, `translate` applies them."""
