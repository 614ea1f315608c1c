"""Which modules each stage gets, and every way to ask for a pipeline that cannot be."""

import pytest

from meshwright.config.loader import load_config
from meshwright.config.parallelism import Parallelism
from meshwright.models.families import MODELS
from meshwright.parallelisms.rules.stages import (
    SCHEDULES,
    assign_modules,
    split_evenly,
    stages_of_rank,
)
from meshwright.system.errors import ConfigError
from tests.helpers.resolved import resolved

PIPELINE = {
    "parallelism.pipeline_parallel_degree": 2,
    "parallelism.data_parallel_shard_degree": 1,
    "model.tokenizer_path": "bytes",
    "training.local_batch_size": 1,
}

SCHEDULE = "parallelism.pipeline_parallel_schedule"
PARTS = "parallelism.module_fqns_per_model_part"


def plan(*words: str, world_size: int = 2):
    given = dict(word.split("=", 1) for word in words)
    config = load_config([f"--{key}={value}" for key, value in (PIPELINE | given).items()])
    return resolved(config, world_size)


def sizes(parts: list[list[str]]) -> list[int]:
    """Layers of each stage."""
    return [sum(name.startswith("layers.") for name in part) for part in parts]


def test_layers_are_dealt_out_evenly_and_in_order() -> None:
    parts = split_evenly([1] * 10, 4, embedding=0, output=0)
    assert sorted(sizes(parts)) == [2, 2, 3, 3]
    names = [name for part in parts for name in part]
    layers = [f"layers.{i}" for i in range(10)]
    assert names == ["tok_embeddings", *layers, "norm", "output"]


def test_embedding_output_and_dear_layers_weigh() -> None:
    for embedding, output, want in (
        *((0, 200, [4, 4, 4, 2]), (100, 100, [3, 4, 4, 3])),
        *((200, 0, [2, 4, 4, 4]), (900, 900, [1, 6, 6, 1])),
    ):
        parts = split_evenly([100] * sum(want), 4, embedding=embedding, output=output)
        assert sizes(parts) == want
    assert sizes(split_evenly([1, 1, 1, 9, 9, 9], 2, embedding=0, output=0)) == [4, 2]


def test_a_large_vocabulary_takes_the_place_of_layers() -> None:
    # 2048 x 256 weights at each end are little beside a layer; 40,000 x 256 are as eleven layers
    assert sizes(plan().pipeline_modules) == [3, 3]
    many = plan("model.args.n_layers=12", f"model.args.vocab_size={4 * 2048}")
    assert sizes(many.pipeline_modules) == [6, 6]


def test_a_full_layer_among_windowed_ones_takes_the_place_of_several() -> None:
    """OLMo 3 7B: layers 3, 7, ... are full. Where layers are alike, attention changes nothing."""
    table, pipeline = (
        MODELS["olmo3"].flavors["olmo3_7b"].table,
        Parallelism(pipeline_parallel_degree=4),
    )
    for seq_len, want in ((4096, [7, 9, 9, 7]), (131072, [8, 9, 9, 6])):
        costs = table.stage_costs(seq_len)
        unseen = (seq_len - 4096) ** 2 / 2  # pairs of a full layer beyond those of a window
        # 2 FLOPs per pair and element of 32 heads of 128, twice; and 2 per parameter and token
        assert costs["layers.3"] - costs["layers.0"] == 4 * 32 * 128 * unseen / (2 * seq_len)
        assert sizes(assign_modules(pipeline, table, seq_len)) == want
    alike = MODELS["llama"].flavors["llama3_8b"].table
    assert alike.stage_costs(4096) == alike.stage_costs(131072)


@pytest.mark.parametrize(
    ("schedule", "want"),
    [("1F1B", [[0], [1]]), ("Interleaved1F1B", [[0, 2], [1, 3]]), ("DualPipeV", [[0, 3], [1, 2]])],
)
def test_which_rank_has_which_stages(schedule, want) -> None:
    stages = sum(map(len, want))
    assert [stages_of_rank(rank, 2, stages, schedule) for rank in (0, 1)] == want


def test_a_batch_that_is_not_given_fills_the_stages_once() -> None:
    """Without a pipeline, the model is whole by any schedule."""
    for schedule in SCHEDULES:
        made = plan(f"{SCHEDULE}={schedule}")
        assert made.config.num_microbatches == len(made.pipeline_modules), schedule
        words = ("parallelism.pipeline_parallel_degree=1", f"{SCHEDULE}={schedule}")
        made = plan(*words, world_size=1)
        assert stages_of_rank(0, 1, len(made.pipeline_modules), schedule) == [0], schedule


def _parts(*parts: str) -> str:
    return f"{PARTS}={[part.split() for part in parts]}"


LAYERS = "layers.0 layers.1 layers.2 layers.3 layers.4 layers.5"


def test_stages_are_cut_as_the_user_says_and_whole_without_a_pipeline() -> None:
    parts = ["tok_embeddings layers.0", f"{LAYERS.removeprefix('layers.0 ')} norm output"]
    assert plan(_parts(*parts)).pipeline_modules == [part.split() for part in parts]
    whole = ("parallelism.pipeline_parallel_degree=1", _parts("tok_embeddings", "norm output"))
    found = plan(*whole, world_size=1)
    assert found.pipeline_modules == [["tok_embeddings", *LAYERS.split(), "norm", "output"]]


PER_RANK = "parallelism.pipeline_parallel_stages_per_rank"
ALWAYS = "parallelism.fsdp_reshard_after_forward=always"
MISTAKES = f"""
training.global_batch_size=1 => 1F1B needs at least one a stage, 2 => the nearest is 2
training.global_batch_size=5 {SCHEDULE}=Interleaved1F1B
    => needs at least one a rank, 2, and full rounds over the ranks => the nearest is 6
training.global_batch_size=3 {SCHEDULE}=DualPipeV => at least one a stage, 4 => the nearest is 4
training.global_batch_size=1 {SCHEDULE}=GPipe => at least one a rank, 2 => the nearest is 2
model.args.n_layers=1 => makes 2 stages, but the model has 1 layers => use at most 1
{PER_RANK}=2 => schedule 1F1B takes 1 => set it to 1, or choose a different
{SCHEDULE}=ZBVZeroBubble {PER_RANK}=3 => schedule ZBVZeroBubble takes 2 => set it to 2
{SCHEDULE}=ZBVZeroBubble compile.enable=true => which compiled blocks cannot => set compile
{SCHEDULE}=ZBVZeroBubble activation_checkpoint.mode=selective
    => saves by op is gone after the first => selective_ac_option = "2"
{SCHEDULE}=DualPipeV model.args.tie_embeddings=true
    => would have the embedding twice => choose "1F1B" or "Interleaved1F1B"
"""
OF_PARTS = {
    (f"tok_embeddings {LAYERS} norm output",): "has 1 parts for 2 stages => merge or split parts",
    ("tok_embeddings layers.0", "layers.1 layers.2 norm output"): (
        "does not name every module once => write tok_embeddings, layers.0, ..., "
    ),
    ("tok_embeddings layer.0", "layers.1 norm output"): "no such module => did you mean layers.0?",
    ("tok_embeddings layers.1 layers.0 layers.2 layers.3", "layers.4 layers.5 norm output"): (
        "does not name every module once, in the order of the model => write"
    ),
    (f"tok_embeddings {LAYERS} norm", "output"): "a stage needs a layer => ",
}
CASES = [
    *(line.split(" => ") for line in MISTAKES.replace("\n    =>", " =>").strip().splitlines()),
    *([_parts(*parts), *text.split(" => ")] for parts, text in OF_PARTS.items()),
    *(
        [f"{SCHEDULE}={name} {ALWAYS}", "torch would lose gradients", '"Interleaved1F1B"']
        for name, schedule in SCHEDULES.items()
        if schedule.splits_backward
    ),
]


@pytest.mark.parametrize(("words", "says", "fix"), CASES)
def test_a_pipeline_that_cannot_be_is_refused_with_a_fix(words, says, fix) -> None:
    with pytest.raises(ConfigError) as error:
        plan(*([words] if words.startswith(PARTS) else words.split()))
    assert says in str(error.value)
    assert fix in str(error.value)
