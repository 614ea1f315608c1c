"""Checkpoints without a job."""

BARE = {
    **{key: {} for key in ("data", "data_identity", "data_content", "model_args", "mesh")},
    "tokens_seen": 0,
    "loss": 1.5,
    "frozen": [],
    "versions": {},
    "config": {},
}
"""A manifest, but for the step."""
