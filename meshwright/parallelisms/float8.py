"""Matrix products in float8, by torchao."""

import dataclasses
from collections.abc import Collection

from meshwright.config.job_config import Float8
from meshwright.log import quiet_torchao
from meshwright.models.decoder import Decoder


def apply_float8(model: Decoder, names: Collection[str], options: Float8) -> str:
    """Have the linear layers of these names multiply in float8, in place.

    Parameters keep their names and types. A layer rounds its input, its weight and the gradient of
    its output to e4m3 (tensorwise: the gradient to e5m2), each scaled to the range of the type,
    and the products are bf16. Source: Micikevicius et al. 2022, arXiv:2209.05433 (the types).

    Args:
        names: of the whole model's layers; a stage of a pipeline takes its own.

    Returns:
        A line for the log.
    """
    with quiet_torchao():  # here, for it is optional, and its import takes 2 s
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name(options.recipe_name)
    convert_to_float8_training(
        model,
        config=dataclasses.replace(recipe, emulate=options.emulate),
        module_filter_fn=lambda _, name: name in names,
    )
    is_rowwise = options.recipe_name == "rowwise"
    return (
        f"float8: {sum(name in names for name, _ in model.named_modules())} layers, "
        f"{options.recipe_name}"
        + ", emulated" * options.emulate
        + "; losses depend on the mesh and on the local batch" * (not is_rowwise)
    )
