"""The section `optimizer` of a TOML."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from meshwright.config.section import Section


class ParameterGroup(Section):
    """[[optimizer.groups]] Parameters with a learning rate or a weight decay of their own."""

    parameters: Annotated[list[str], Field(min_length=1)]
    """Glob patterns of parameter names: ["tok_embeddings.*"], ["layers.[01].*", "*norm.weight"]. A
    parameter is in the first group that matches it."""

    lr_scale: PositiveFloat = 1.0
    """Factor on the learning rate of every step."""

    weight_decay: NonNegativeFloat | None = None
    """Instead of the parameter's usual one. Absent: the usual one."""

    optimizer: str | None = None
    """Optimizer of these parameters, as `optimizer.name`. Absent: the one of their role."""


def _three(numbers: list[float]) -> list[float]:
    if len(numbers) != 3:
        raise ValueError(f"must be three numbers, [a, b, c], and these are {len(numbers)}")
    return numbers


class Muon(Section):
    """[optimizer.muon] Momentum that is made orthogonal, matrix by matrix. Defaults of Jordan 2024
    (kellerjordan.github.io/posts/muon), except `lr_scale`."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay per step of the gradient's EMA."""

    nesterov: bool = True
    """Use the gradient and the mean after it, not only the mean."""

    steps: Annotated[int, Field(ge=1, le=20)] = 5
    """Newton-Schulz steps."""

    coefficients: Annotated[list[float], AfterValidator(_three)] = [3.4445, -4.7750, 2.0315]
    """[a, b, c] of each step: X becomes a X + b (X X^T) X + c (X X^T)^2 X."""

    lr_scale: Literal["match_rms_adamw", "spectral"] = "match_rms_adamw"
    """Factor on the update of R x C numbers. match_rms_adamw: 0.2 sqrt(max(R, C)), so that lr and
    weight decay of AdamW fit (Liu et al. 2025, arXiv:2502.16982). spectral: sqrt(max(1, R / C)),
    for rates of about 0.02 (Jordan 2024)."""

    split_heads: bool = False
    """Make queries, keys, values and gates orthogonal head by head, also those of linear attention,
    instead of all heads as one matrix."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the Newton-Schulz steps, and of the matrices that ranks exchange."""


class Optimizer(Section):
    """[optimizer] The update of master weights in `training.dtype`."""

    name: str = "AdamW"
    """AdamW subtracts weight decay from the weights, Adam adds it to the gradient. muon: Muon for
    the matrices in layers, AdamW for embedding, output, norms and biases.
    `experimental.custom_import` may add one."""

    lr: PositiveFloat = 8e-4
    """Peak learning rate."""

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay per step of the gradient's EMA."""

    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay per step of the squared gradient's EMA."""

    eps: PositiveFloat = 1e-8
    """Added to the denominator of the update."""

    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of parameters with two dimensions: matrices and embeddings."""

    decay_norm_and_bias: bool = False
    """Apply weight decay to weights of norms and to biases as well."""

    groups: list[ParameterGroup] = []
    """Parameters with their own settings: tables [[optimizer.groups]], each with `parameters`
    (glob patterns of names, as in `model.frozen`), and `lr_scale` (a factor on the learning rate),
    `weight_decay` or `optimizer`. The first group that matches a parameter counts."""

    muon: Muon = Muon()

    qk_clip_threshold: PositiveFloat | None = None
    """QK-clip (Kimi Team 2025, arXiv:2507.20534): if a head's largest attention logit is above it,
    the head's query and key weights are multiplied so that it would have been equal. The report has
    100. Absent: off."""

    qk_clip_interval: PositiveInt = 1
    """Steps from one check of the logits to the next. Each costs one more forward of the global
    batch, a third of a step's FLOPs."""

    early_step_in_backward: bool = False
    """Update each parameter during backward, as soon as its gradient is final, and free that: the
    gradients of the whole model are never in memory together. Needs `training.max_norm = inf`, and
    optimizers that update element by element."""
