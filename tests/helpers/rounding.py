"""How far two computations of the same may differ in fp32 that add up in another order."""

import torch

from meshwright.models.families.llama import LlamaArgs
from meshwright.train.optim.update import LR_SCALE
from tests.helpers.tiny import SEQ_LEN, TINY

ROUNDOFF = 2.0**-24
"""Of one operation in fp32, relative: its unit roundoff."""
DEVIATIONS = 4
"""Standard deviations of a sum's rounding that are allowed: more has a probability below 1e-3
(Higham and Mary, doi 10.1137/18M1226312, theorem 2.4), and a norm is over many sums."""
CONDITION = 1.55**2
"""How much an update by `adamw` may increase the relative error of gradients."""
FIGURES_BOUND = 32 * ROUNDOFF
"""Of losses and gradient norms, relative. They are sums of terms of one sign, in which the errors
of single logits and gradients cancel: a few roundings are left."""


def adamw(model) -> torch.optim.Optimizer:
    """AdamW whose updates are about as exact as the gradients.

    Adam's m / (sqrt(v) + eps) is the sign of a gradient that is much larger than eps, and where the
    gradient is nearly 0, rounding decides the sign. With eps = 1 no gradient of these tests is
    larger than 0.55 eps. An absolute error then grows by up to 1.55, through m and through v, and
    the update is up to 1.55 times smaller than m. With lr = 1 updates have the size of gradients.
    """
    group = {"params": [*model.parameters()], LR_SCALE: 1.0}
    return torch.optim.AdamW([group], lr=1.0, eps=1.0, fused=True)


def gradient_bound(args: LlamaArgs = TINY, num_tokens: int = 8 * SEQ_LEN) -> float:
    """The largest difference of a parameter's gradient, relative to its 2-norm.

    A sum of n terms of either sign is off by about sqrt(n) roundings of the size of the result.
    From a weight to the loss and back there is a sum for each matmul. Their errors are independent,
    so the squares add up: n is the number of terms along the path. Both computations are off.
    """
    width, head = args.dim, args.dim // args.n_heads
    attention = 2 * width + head + SEQ_LEN  # wq, wk or wv; wo; scores; weighted values
    block = attention + width + args.hidden_dim + 2 * width  # w1 or w3; w2; both norms
    path = args.n_layers * block + width + args.vocab_size  # output; softmax
    return 2 * DEVIATIONS * ROUNDOFF * (2 * path + num_tokens) ** 0.5


def assert_updated_alike(
    got: torch.Tensor,
    want: torch.Tensor,
    before: torch.Tensor,
    name: str,
    *,
    args: LlamaArgs = TINY,
    num_steps: int = 1,
) -> None:
    """Compare a weight, or an average of gradients, after `num_steps` updates by `adamw`.

    The difference is that of the updates, and a rounding of the weight itself in each update.

    Args:
        before: the value from which both started.
    """
    moved, size = ((x.double()).norm().item() for x in (want - before, want))
    allowed = CONDITION * gradient_bound(args) * moved + 2 * num_steps * ROUNDOFF * size
    error = (got.double() - want.double()).norm().item()
    assert error <= allowed, f"{name} is {error:.1e} off, where {allowed:.1e} is allowed"
