"""Which jobs the sentry can compare the ranks of. Free of torch."""

from meshwright.config.rules import Facts, Row, Rule

LEAVE_OUT = "leave [sentry] out"

RULES: tuple[Row[Facts], ...] = (
    Rule(
        "sentry.interval",
        lambda c, _: c.sentry.interval and c.num_data_ranks == 1,
        "there is one data-parallel rank, so no other one computes the same",
        f"{LEAVE_OUT}, or set parallelism.data_parallel_shard_degree = 2 or more",
        needs="world_size",
    ),
    Rule(
        "sentry.interval",
        lambda c, _: c.sentry.interval and c.parallelism.expert_parallel_degree > 1,
        "with expert parallelism ranks compute rows of each other, so it isn't known who was wrong",
        f"{LEAVE_OUT}, or set parallelism.expert_parallel_degree = 1",
    ),
)
